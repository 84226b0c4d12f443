"""What does work on a model that an engine is refused on: tried, not guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

from torch import nn

from gradfree.chains.report import Report
from gradfree.engines.discovery import Chains
from gradfree.entries import ENGINES, entries, load


class Examining(Protocol):
    """All that is asked of engines here."""

    @property
    def needs_residual(self) -> bool:
        """Whether it asks for a chain's residual path."""

    @property
    def pulls_at_once(self) -> bool:
        """Whether it asks for the pulls of all links at once."""

    def find(self, model: nn.Module, chains: Chains | None) -> Report:
        """Return the chains of a model."""

    def examine(self, model: nn.Module, chains: Chains | None, residual: float | None, batch: Any) -> Report:
        """Tell whether the engine can be attached, and say no more than that."""


def told(engine: Examining, model: nn.Module, chains: Chains | None, residual: float | None, batch: Any) -> str:
    """Return what else can be done with a model that ``engine`` cannot be attached to in this way; "" if nothing.

    Args:
        engine: that is refused.
        model: as in :meth:`gradfree.Engine.validate`.
        chains: likewise.
        residual: likewise.
        batch: likewise; with one all is tried in dry runs.
    """
    found = "; ".join(_working(engine, model, chains, residual, batch))
    return found and f"tried on this model{'' if batch is None else ' and batch'}, these work: {found}."


def _working(
    engine: Examining, model: nn.Module, chains: Chains | None, residual: float | None, batch: Any
) -> Iterator[str]:
    if engine.needs_residual and residual is None and _works(engine, model, chains, 1.0, batch):
        yield "attach(..., residual=1.0)"
    if chains is None:
        paths = list(engine.find(model, None).chains)
        fit = [path for path in paths if len(paths) > 1 and _works(engine, model, [path], residual, batch)]
        if fit and _works(engine, model, fit, residual, batch):
            yield f"chains={fit!r}"
    others = {name: other for name, other in _made() if type(other) is not type(engine)}
    # On a batch those that pull come first: dense Jacobians may take a hundred times as long.
    for turn in (others,) if batch is None else (_of(others, True), _of(others, False)):
        names = [name for name, other in turn.items() if _works(other, model, chains, None, batch)]
        if names:
            yield f"the engine{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
            return


def _made() -> Iterator[tuple[str, Examining]]:
    """Yield every engine, but for what other packages have that cannot be loaded, needs options, or is none."""
    for name, entry in entries(ENGINES).items():
        with suppress(Exception):
            if hasattr(made := load(entry)(), "examine"):
                yield name, made


def _of(engines: Mapping[str, Examining], at_once: bool) -> dict[str, Examining]:
    return {name: engine for name, engine in engines.items() if engine.pulls_at_once is at_once}


def _works(engine: Examining, model: nn.Module, chains: Chains | None, residual: float | None, batch: Any) -> bool:
    try:
        report = engine.examine(model, chains, residual, batch)
    except Exception:  # Whatever it says, it does not work.
        return False
    return report.ok and bool(report.chains)
