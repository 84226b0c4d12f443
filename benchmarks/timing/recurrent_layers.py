"""What a forward and backward pass of one recurrent layer costs with each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor, nn

from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.estimates import Estimate
from gradfree.benchmarks.tables.facts import Fact, estimates, fact, select
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.cell_loop import CellLoop
from gradfree.benchmarks.timing.profiles import peak_memory
from gradfree.benchmarks.timing.side_by_side import MEMORY, Timings, times
from gradfree.benchmarks.timing.speed import Step, Timing, Turn

_MODULES: dict[str, Callable[..., nn.RNNBase]] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
_SIZES = {"steps": "steps", "batch": "sequences", "units": "units"}
"""A layer's, with names for people."""

PLAIN = "plain"
_LOOP = "loop over cells"
_FAILED = "failed"
_RATIO = times(PLAIN)


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer of torch's, with a batch of sequences of as many features as it has units."""

    cell: str
    batch: int
    steps: int
    units: int

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.steps}, {self.units})"


class LayerPass:
    """A forward and backward pass of a layer: as it is, as a loop over cells, or with an engine."""

    def __init__(self, case: LayerCase[Any], row: Row | None = None, lean: bool = False, loop: bool = False):
        torch.manual_seed(case.seed)
        layer = case.layer
        shape = (layer.batch, layer.steps, layer.units)
        self.x = torch.randn(shape, device=case.device, requires_grad=True)
        self.cotangent = torch.randn(shape, device=case.device)
        plain = _MODULES[layer.cell](layer.units, layer.units, batch_first=True).to(case.device)
        self.module: nn.Module = CellLoop(plain) if loop else plain
        if row is not None:
            row.create_engine().attach(self.module, [""], lean=lean)

    def run(self) -> Tensor:
        """Return the outputs."""
        out: Tensor = self.module(self.x)[0]
        return out

    def __call__(self) -> None:
        """Run both passes."""
        self.run().backward(self.cotangent)
        self.x.grad = None
        self.module.zero_grad()


@dataclass(frozen=True, kw_only=True)
class LayerCase(Timing[Step]):
    """A measurement of one layer."""

    layer: RecurrentLayer

    @property
    def topic(self) -> str:
        """The layer."""
        return str(self.layer)


@dataclass(frozen=True, kw_only=True)
class LayerTiming(LayerCase[LayerPass]):
    """Time and peak memory of a layer's forward and backward pass: plain, as a loop over cells, by engine.

    A GRU is also run with the first engine in its lean form; other layers have no other form.
    """

    kind: ClassVar[str] = "layer"

    def steps(self) -> Mapping[str, Callable[[], LayerPass]]:
        """Return what builds the passes."""
        passes = {PLAIN: partial(LayerPass, self), _LOOP: partial(LayerPass, self, loop=True)}
        passes |= {row.label: partial(LayerPass, self, row) for row in self.rows}
        if self.layer.cell == "GRU":
            passes[_lean(self.rows)] = partial(LayerPass, self, self.rows[0], lean=True)
        return passes

    def costs(self, step: LayerPass, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the peak memory in bytes."""
        return {"peak_memory": peak_memory(step, self.device)}


@dataclass(frozen=True)
class LayerTimings(Timings[RecurrentLayer]):
    """Engines on single layers; cells without a gate are not run with engines that need one."""

    metric: ClassVar[str] = "time of forward and backward"

    def case(self, layer: RecurrentLayer, /, **where: Any) -> LayerTiming:
        """Return the case that times a layer."""
        rows = tuple(row for row in self.rows if layer.cell != "RNN" or row.engine != "highway_bp")
        return LayerTiming(layer=layer, **where | {"rows": rows})

    def told(self, case: Case, record: Record) -> Iterator[Fact]:
        """Yield what each row takes, or that the layer could not be timed."""
        if error_of(record):
            yield fact(self.metric, "s", note=_FAILED, row=PLAIN)
        yield from super().told(case, record)

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of times and memory as multiples of the plain layer's, a row a layer."""
        known = {str(a): estimates(facts, metric=self.metric, unit=_RATIO, setting=str(a)) for a in self.subjects}
        labels = (_LOOP, *(row.label for row in self.rows), _lean(self.rows))
        shown = [label for label in labels if any(label in ratios for ratios in known.values())]
        figures = Figure(self.metric, unit=_RATIO), Figure(MEMORY, "{value:.1f}", _RATIO)
        ratios = {f"{label} on {layer}": t for layer, ts in known.items() for label, t in ts.items()}
        return Section(
            title=f"recurrent layers, device: {facts['device'][0]}, threads: {self.threads}",
            facts=facts,
            names={"layer": "setting"},
            columns=[
                column("plain (ms)", self.metric, "{value:.1f}", "s", factor=1e3, row=PLAIN),
                *(Column(label, figures, {"row": label}) for label in shown),
            ],
            legend="Forward and backward pass; time as a multiple of the plain module's own, median of interleaved "
            "rounds, and in brackets peak memory as a multiple of its. Sizes: sequences, steps, units.",
            verdicts=[_verdict(known[layer]) for layer in dict.fromkeys(facts["setting"])],
            remarks=[verdict.steadiness(ratios), *self.failures(facts)],
            charts=[chart for size in _SIZES for chart in self._charts(facts, size)],
        )

    def _charts(self, facts: pl.DataFrame, size: str) -> Iterator[Chart]:
        """Yield time and memory against a size, where several were run that differ in nothing else."""
        known = set(select(facts, metric=self.metric, unit=_RATIO)["setting"])
        swept = _swept([layer for layer in self.subjects if str(layer) in known], size)
        if not swept:
            return
        others = ", ".join(f"{getattr(swept[0], other)} {_SIZES[other]}" for other in _SIZES if other != size)
        where = f"{swept[0].cell}, {others}, {facts['device'][0]}, {self.threads} threads"
        at = pl.col("setting").replace_strict(
            {str(layer): float(getattr(layer, size)) for layer in swept}, default=None, return_dtype=pl.Float64
        )
        found = facts.with_columns(at=at).filter(pl.col("at").is_not_null(), pl.col("row") != PLAIN).sort("at")
        for name, metric, what in (("time", self.metric, "time"), ("memory", MEMORY, "peak memory")):
            yield Chart(
                f"{where}: {name} against {_SIZES[size]}",
                points(found, "at", Figure(metric, unit=_RATIO), label="row"),
                Axis(f"{_SIZES[size]} (count)", "counts"),
                Axis(f"{what}, as a multiple of nn.{swept[0].cell}'s own (×)", "log"),
                "solid",
                rules={"the plain layer": 1.0},
            )


def _verdict(ratios: Mapping[str, Estimate]) -> str:
    """Say which engine is fastest, and which are slower than the plain module."""
    known = {label: ratio for label, ratio in ratios.items() if label not in (PLAIN, _LOOP)}
    if not known:
        return _FAILED
    fastest = min(known, key=lambda label: known[label].value)
    words = f"fastest is {fastest}, {verdict.speed(known[fastest], 'the plain layer')}"
    slower = ", ".join(f"{label} ({ratio.value:.2f}×)" for label, ratio in known.items() if ratio.low > 1)
    return f"{words}; slower: {slower}" if slower else words


def _swept(layers: Sequence[RecurrentLayer], size: str) -> list[RecurrentLayer]:
    """Return the largest number of ``layers`` that differ in ``size`` alone, ascending; none if there are no two."""
    groups: dict[RecurrentLayer, list[RecurrentLayer]] = {}
    for layer in layers:
        others: dict[str, Any] = {size: 0}
        groups.setdefault(replace(layer, **others), []).append(layer)
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=attrgetter(size)) if len(largest) > 1 else []


def _lean(rows: tuple[Row, ...]) -> str:
    return f"{rows[0].label}, lean"
