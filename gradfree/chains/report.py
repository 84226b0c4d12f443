"""The report of an engine's checks of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan

from gradfree.chains.site import Site
from gradfree.chains.survey import LinkFindings


@dataclass(frozen=True)
class Report:
    """What an engine would do with a model.

    Attributes:
        chains: the chains by module path.
        problems: why the engine cannot be attached, each with the module path and the remedy.
        notes: remarks that do not prevent attaching.
        findings: results of a dry run for each chain, by path: the links that the engine solves together, piece by
            piece in the order of the forward pass. Empty without a batch.
    """

    chains: Mapping[str, Site] = field(default_factory=dict)
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    findings: Mapping[str, Sequence[Sequence[LinkFindings]]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the engine can be attached."""
        return not self.problems

    def __str__(self) -> str:
        lines = []
        for path, site in self.chains.items():
            lines.append(f"chain {path_name(path)}: {site}")
            if path in self.findings:
                lines += [f"  {line}" for line in _lines(site, self.findings[path])]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) or "no chain is touched"


def path_name(path: str) -> str:
    """Return the name of the module at ``path`` for messages."""
    return repr(path) if path else "'' (the model itself)"


def _lines(site: Site, pieces: Sequence[Sequence[LinkFindings]]) -> Iterator[str]:
    """Yield the lines about a chain after a dry run."""
    if len(pieces) > 1:
        yield f"{len(pieces)} pieces: {', '.join(map(_span, pieces))}"
    for reason in dict.fromkeys(site.splits.values()):
        yield f"split at {_listed([path for path, why in site.splits.items() if why == reason])}: {reason}"
    if rest := [path for path in site.blocks if path not in site.solved and path not in site.splits]:
        yield f"not run by the engine: {_listed(rest)}"
    for piece in pieces:
        residual = _range(link.residual for link in piece if link.residual is not None)
        explained = _range(link.share for link in piece if not isnan(link.share))
        if residual:
            batches = ", in batches" if piece[0].batched else ""
            yield f"{_span(piece)}: residual path {residual}, its share {explained or 'unknown'}{batches}"


def _range(values: Iterable[float]) -> str:
    """Return the smallest and the largest value in words; "" without values."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (*found[:1], *found[-1:])))


def _span(links: Sequence[LinkFindings]) -> str:
    first, last = links[0].path, links[-1].path
    return first if len(links) == 1 else f"{first} to {last}"


def _listed(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
