"""What a forward and backward pass of one recurrent layer costs with each engine, on long sequences, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree import engine_figures
from gradfree.benchmarks.records.case import ADDED, Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimates, fact, select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import MEMORY, Step, Timing, Timings, Turn, now, times

COMPILED = "compiled loop"

_CELLS: dict[str, type[nn.GRUCell] | type[nn.LSTMCell] | type[nn.RNNCell]] = {
    "GRU": nn.GRUCell,
    "LSTM": nn.LSTMCell,
    "RNN_TANH": nn.RNNCell,
}
_MODULES: dict[str, Callable[..., nn.RNNBase]] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
_SIZES = {"steps": "steps", "batch": "sequences", "units": "units"}
"""A layer's, with names for people."""
PLAIN = "plain"
_LOOP = "loop over cells"
_FAILED = "failed"
_RATIO = times(PLAIN)
SWEEPS, FORWARD_SWEEPS, SEQUENTIAL = "sweeps", "forward sweeps", "sequential"
"""Figures of engines that solve chains to a tolerance."""


class CellLoop(nn.Module):
    """A fused recurrent layer's stand-in: the same computation as a Python loop over torch's cell."""

    def __init__(self, layer: nn.RNNBase, compiled: bool = False):
        super().__init__()
        cell = _CELLS[layer.mode](layer.input_size, layer.hidden_size).to(next(layer.parameters()))
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
        # Not Module.compile: of torch's own modules it compiles nothing, without a word.
        self.cell = torch.compile(cell) if compiled else cell

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, T, H) for inputs ``x`` (B, T, I), and the final states (parts, B, H)."""
        parts = None if state is None else tuple(state)
        outputs = []
        for step in x.unbind(1):
            h = self.cell(step, parts if parts is None or len(parts) > 1 else parts[0])
            parts = h if isinstance(h, tuple) else (h,)
            outputs.append(parts[0])
        return torch.stack(outputs, 1), torch.stack(parts or ())


class InPieces(nn.Module):
    """A fused recurrent layer, called with as many steps at a time as cuDNN takes: it refuses 65,536 and more."""

    most: ClassVar[int] = 2**15

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the outputs and the final states; the graph goes through all pieces."""
        steps = 1 if self.layer.batch_first else 0
        state, outputs = None, []
        for piece in x.split(self.most, steps):
            out, state = self.layer(piece, state)
            outputs.append(out)
        return torch.cat(outputs, steps), state


def replace_layers(model: nn.Module, loop: Callable[[nn.RNNBase], nn.Module]) -> None:
    """Put what ``loop`` returns in the place of each of the model's fused recurrent layers."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.RNNBase):
            model.set_submodule(path, loop(layer))


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer of torch's, with a batch of sequences of as many features as it has units."""

    cell: str
    batch: int
    steps: int
    units: int
    dtype: str = field(default="float32", metadata=ADDED)
    batch_first: bool = field(default=True, metadata=ADDED)

    def __str__(self) -> str:
        others = ("" if self.dtype == "float32" else self.dtype), ("" if self.batch_first else "time first")
        return ", ".join([f"{self.cell} ({self.batch}, {self.steps}, {self.units})", *filter(None, others)])


class LayerPass:
    """A forward and backward pass of a layer: as it is, as a loop over cells, or with an engine."""

    def __init__(
        self,
        case: LayerCase[Any],
        row: Row | None = None,
        lean: bool = False,
        loop: Callable[[nn.RNNBase], nn.Module] | None = None,
    ):
        torch.manual_seed(case.seed)
        layer = case.layer
        sizes = (layer.batch, layer.steps) if layer.batch_first else (layer.steps, layer.batch)
        dtype = getattr(torch, layer.dtype)
        # Drawn in one precision for all.
        self.x, self.cotangent = (torch.randn(*sizes, layer.units).to(case.device, dtype) for _ in range(2))
        self.x.requires_grad_()
        plain = _MODULES[layer.cell](layer.units, layer.units, batch_first=layer.batch_first).to(case.device, dtype)
        self.module: nn.Module = plain if loop is None else loop(plain)
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

    topic_field: ClassVar[str] = "layer"
    layer: RecurrentLayer


@dataclass(frozen=True, kw_only=True)
class LayerTiming(LayerCase[LayerPass]):
    """Time and peak memory of a layer's forward and backward pass: plain, as a loop over cells, by engine.

    A GRU is also run with the first engine in its lean form; other layers have no other form.
    """

    kind: ClassVar[str] = "layer"
    weighed: ClassVar[bool] = True

    def steps(self) -> Mapping[str, Callable[[], LayerPass]]:
        """Return what builds the passes."""
        passes = {PLAIN: partial(LayerPass, self), _LOOP: partial(LayerPass, self, loop=CellLoop)}
        passes |= {row.label: partial(LayerPass, self, row) for row in self.rows}
        if self.layer.cell == "GRU":
            passes[_lean(self.rows)] = partial(LayerPass, self, self.rows[0], lean=True)
        return passes


@dataclass(frozen=True)
class LayerTimings(Timings[RecurrentLayer]):
    """Engines on single layers; cells without a gate are not run with engines that need one."""

    metric: ClassVar[str] = "time of forward and backward"
    share: ClassVar[str] = "{value:.2f}"

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
        labels = (_LOOP, COMPILED, *(row.label for row in self.rows), _lean(self.rows))
        shown = [label for label in labels if any(label in ratios for ratios in known.values())]
        figures = Figure(self.metric, self.share, _RATIO), Figure(MEMORY, "{value:.1f}", _RATIO)
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
        ends = f"{getattr(swept[0], size)} to {getattr(swept[-1], size)}"
        at = pl.col("setting").replace_strict(
            {str(layer): float(getattr(layer, size)) for layer in swept}, default=None, return_dtype=pl.Float64
        )
        found = facts.with_columns(at=at).filter(pl.col("at").is_not_null(), pl.col("row") != PLAIN).sort("at")
        for name, metric, what in (("time", self.metric, "time"), ("memory", MEMORY, "peak memory")):
            yield Chart(
                f"{where}: {name} against {_SIZES[size]}, {ends}",
                points(found, "at", Figure(metric, unit=_RATIO), label="row"),
                Axis(f"{_SIZES[size]} (count)", "counts"),
                Axis(f"{what}, as a multiple of nn.{swept[0].cell}'s own (×)", "log"),
                True,
                rules={"the plain layer": 1.0},
            )


def _verdict(ratios: Mapping[str, Estimate]) -> str:
    """Say which engine is fastest, and which are slower than the plain module."""
    known = {label: ratio for label, ratio in ratios.items() if label not in (PLAIN, _LOOP, COMPILED)}
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


@dataclass(frozen=True, kw_only=True)
class LongLayerTiming(LayerTiming):
    """Time and peak memory of a layer's forward and backward pass: plain and by engine, pass by pass.

    Attributes:
        compiled: whether a loop over a compiled cell is run, too: it takes long to compile, and to run.
    """

    kind: ClassVar[str] = "long layer"
    rounds: ClassVar[int] = 5
    compiled: bool = False

    def steps(self) -> Mapping[str, Callable[[], LayerPass]]:
        """Return what builds the passes."""
        loops = {COMPILED: partial(LayerPass, self, loop=partial(CellLoop, compiled=True))} if self.compiled else {}
        pieces = InPieces if self.layer.steps > InPieces.most else None
        return {
            PLAIN: partial(LayerPass, self, loop=pieces),
            **loops,
            **{row.label: partial(LayerPass, self, row) for row in self.rows},
        }

    def turn(self, step: LayerPass) -> Turn:
        """Take a step; return how long it took."""
        start = now(self.device)
        step()
        return (now(self.device) - start,)

    def costs(self, step: LayerPass, turns: Sequence[Turn]) -> dict[str, Any]:
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
        pieces = f" Beyond {InPieces.most} steps the plain module is called piece by piece: cuDNN refuses 65,536."
        legend = section.legend + (pieces if lengths[-1] > InPieces.most else "")
        return replace(section, title=title, legend=legend, remarks=[*self._sweeps(facts), *section.remarks])

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
