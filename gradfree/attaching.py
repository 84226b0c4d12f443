"""Putting an engine on a model's chains, and taking it off again."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from gradfree.chain import ChainError
from gradfree.site import Removable
from gradfree.validation import Report

if TYPE_CHECKING:
    from gradfree.engine import Engine


class Handle:
    """An engine attached to a model; :meth:`detach`, or the end of its ``with`` block, restores the model."""

    def __init__(self, parts: Sequence[Removable]):
        self._parts = parts

    def detach(self) -> None:
        """Take the engine off; a second call does nothing. Graphs recorded before keep the engine."""
        for part in self._parts:
            part.remove()
        self._parts = []

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
    return Handle([part for site in report.chains.values() for part in site.record(engine)])
