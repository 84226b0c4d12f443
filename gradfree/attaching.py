"""Putting an engine on a model's chains, and taking it off again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from gradfree.chain import ChainError
from gradfree.site import Removable
from gradfree.validation import Report

if TYPE_CHECKING:
    from gradfree.engine import Engine


class Handle:
    """An engine attached to a model; :meth:`detach`, or the end of its ``with`` block, restores the model."""

    def __init__(self, parts: Sequence[Removable] = (), memory: Mapping[str, dict[str, Tensor]] | None = None):
        self._parts = parts
        self._memory = memory or {}

    def detach(self) -> None:
        """Take the engine off; a second call does nothing. Graphs recorded before keep the engine."""
        for part in self._parts:
            part.remove()
        self._parts = []

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return what the engine keeps of each chain from pass to pass, by module path; empty for most engines."""
        return {path: dict(kept) for path, kept in self._memory.items() if kept}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take up where another run left off.

        Raises:
            ValueError: a chain that this handle does not have; nothing is loaded then.
        """
        if unknown := state.keys() - self._memory.keys():
            raise ValueError(f"no chains {sorted(unknown)} here; there are {sorted(self._memory)}.")
        for path, kept in self._memory.items():
            kept.clear()
            kept.update(state.get(path, {}))

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(engine: Engine, model: nn.Module, report: Report) -> Handle:
    """Put ``engine`` on the chains of ``report``; see :meth:`gradfree.Engine.attach`."""
    if not report.ok:
        problems = "\n".join(f"- {problem}" for problem in report.problems)
        raise ChainError(f"{type(engine).__name__} cannot be attached to {type(model).__name__}:\n{problems}")
    memory: dict[str, dict[str, Tensor]] = {path: {} for path in report.chains}
    parts = [p for path, site in report.chains.items() for p in engine.parts(site, memory[path])]
    return Handle([*parts, *(p for site in report.chains.values() for p in engine.alter(site))], memory)
