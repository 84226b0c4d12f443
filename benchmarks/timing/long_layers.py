"""What a forward and backward pass of a recurrent layer costs where sequences are long, and the sweeps it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import polars as pl

from gradfree import engine_figures
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.cell_loop import COMPILED, CellLoop
from gradfree.benchmarks.timing.recurrent_layers import PLAIN, LayerTiming, LayerTimings, Pass, RecurrentLayer
from gradfree.benchmarks.timing.speed import Turn, now

SWEEPS, FORWARD_SWEEPS, SEQUENTIAL = "sweeps", "forward sweeps", "sequential"
"""Figures of engines that solve chains to a tolerance."""


@dataclass(frozen=True, kw_only=True)
class LongLayerTiming(LayerTiming):
    """Time and peak memory of a layer's forward and backward pass: plain and by engine, pass by pass.

    Attributes:
        compiled: whether a loop over a compiled cell is run, too: it takes long to compile, and to run.
    """

    kind: ClassVar[str] = "long layer"
    rounds: ClassVar[int] = 5
    compiled: bool = False

    def steps(self) -> Mapping[str, Callable[[], Pass]]:
        """Return what builds the passes."""
        loops = {COMPILED: partial(Pass, self, loop=partial(CellLoop, compiled=True))} if self.compiled else {}
        return {PLAIN: partial(Pass, self), **loops, **{row.label: partial(Pass, self, row) for row in self.rows}}

    def turn(self, step: Pass) -> Turn:
        """Take a step; return how long it took."""
        start = now(self.device)
        step()
        return (now(self.device) - start,)

    def costs(self, step: Pass, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the peak memory in bytes, and what the engine tells of a pass."""
        with engine_figures() as figures:
            step()
        told = {name: float(figure) for chain in figures.values() for name, figure in chain.items()}
        return {**super().costs(step, turns), "figures": told}


@dataclass(frozen=True)
class LongLayerTimings(LayerTimings):
    """Engines on single layers and long sequences.

    Attributes:
        compiled_up_to: the most steps for which a loop over a compiled cell is run, of layers in float32.
    """

    share: ClassVar[str] = "{value:.3f}"
    compiled_up_to: int = 0

    def case(self, layer: RecurrentLayer, /, **where: Any) -> LongLayerTiming:
        """Return the case that times a layer."""
        compiled = layer.steps <= self.compiled_up_to and layer.dtype == "float32"
        return LongLayerTiming(layer=layer, compiled=compiled, **where)

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes, and how its chains were solved."""
        yield from super().cost(cost, results)
        for name in (SWEEPS, FORWARD_SWEEPS, SEQUENTIAL):
            if name in cost.get("figures", {}):
                yield fact(name, "count", cost["figures"][name])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of times and memory as multiples of the plain layer's, and how many sweeps it took."""
        section = super().section(facts)
        lengths = sorted({layer.steps for layer in self.subjects})
        title = section.title.replace("layers", f"layers, {lengths[0]} to {lengths[-1]} steps", 1)
        return replace(section, title=title, remarks=[*self._sweeps(facts), *section.remarks])

    def _sweeps(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield the sweeps of each engine that goes on to a tolerance."""
        for row in self.rows:
            told = {
                name: estimates(facts, "setting", metric=name, row=row.label)
                for name in (FORWARD_SWEEPS, SWEEPS, SEQUENTIAL)
            }
            found = [
                f"{layer} {_count(told[FORWARD_SWEEPS], layer)} and {sweeps.value:.0f}"
                + (", then sequentially" if told[SEQUENTIAL][layer].value else "")
                for layer, sweeps in told[SWEEPS].items()
                if layer in told[SEQUENTIAL]
            ]
            if found:
                yield f"Sweeps of {row.label} behind the first run, forward and backward: {'; '.join(found)}."


def _count(told: Mapping[str, Any], layer: str) -> str:
    return f"{told[layer].value:.0f}" if layer in told else "none"
