"""The report of an engine's checks of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradfree.chains.site import Site
from gradfree.chains.survey import ChainFindings


@dataclass(frozen=True)
class Report:
    """What an engine would do with a model.

    Attributes:
        chains: the chains by module path.
        problems: why the engine cannot be attached, each with the module path and the remedy.
        notes: remarks that do not prevent attaching.
        findings: results of a dry run for each chain, by path; empty without a batch.
    """

    chains: Mapping[str, Site] = field(default_factory=dict)
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    findings: Mapping[str, ChainFindings] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the engine can be attached."""
        return not self.problems

    def __str__(self) -> str:
        lines = []
        for path, site in self.chains.items():
            found = self.findings.get(path, ChainFindings())
            lines += [f"chain {path_name(path)}: {site}", *(f"  {line}" for line in found.lines())]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) or "no chain is touched"


def path_name(path: str) -> str:
    """Return the name of the module at ``path`` for messages."""
    return repr(path) if path else "'' (the model itself)"
