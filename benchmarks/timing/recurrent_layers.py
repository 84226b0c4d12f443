"""What a forward and backward pass of one recurrent layer costs with each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import nan
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import Styles, add_legend, count_axis, draw_curves, ratio_axis
from gradfree.benchmarks.tables.estimates import Bar, Spread
from gradfree.benchmarks.tables.experiment import Part, outcomes
from gradfree.benchmarks.tables.section import Draw, Fact, Plots, Section
from gradfree.benchmarks.timing.cell_loop import CellLoop
from gradfree.benchmarks.timing.memory import peak_memory
from gradfree.benchmarks.timing.speed import Step, Timing, Turn

_MODULES: dict[str, Callable[..., nn.RNNBase]] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
_SIZES = {"steps": "steps", "batch": "sequences", "units": "units"}
"""A layer's, with names for people."""

PLAIN = "plain"
_LOOP = "loop over cells"


@dataclass(frozen=True)
class Layer:
    """A layer of torch's, with a batch of sequences of as many features as it has units."""

    cell: str
    batch: int
    steps: int
    units: int

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.steps}, {self.units})"


class Pass:
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

    layer: Layer

    @property
    def topic(self) -> str:
        """The layer."""
        return str(self.layer)


@dataclass(frozen=True, kw_only=True)
class LayerTiming(LayerCase[Pass]):
    """Time and peak memory of a layer's forward and backward pass: plain, as a loop over cells, by engine.

    A GRU is also run with the first engine in its lean form; other layers have no other form.
    """

    kind: ClassVar[str] = "layer"

    def steps(self) -> Mapping[str, Callable[[], Pass]]:
        """Return what builds the passes."""
        passes = {PLAIN: partial(Pass, self), _LOOP: partial(Pass, self, loop=True)}
        passes |= {row.label: partial(Pass, self, row) for row in self.rows}
        if self.layer.cell == "GRU":
            passes[_lean(self.rows)] = partial(Pass, self, self.rows[0], lean=True)
        return passes

    def costs(self, step: Pass, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the peak memory in bytes."""
        return {"peak_memory": peak_memory(step, self.device)}


@dataclass(frozen=True)
class LayerTimings(Part):
    """Engines on single layers.

    Attributes:
        layers: what is run.
        rows: the engines.
        threads: for torch to use.
    """

    layers: tuple[Layer, ...]
    rows: tuple[Row, ...]
    threads: int

    def timing(self, device: str) -> Iterator[LayerTiming]:
        """Yield one case a layer; cells without a gate are not run with engines that need one."""
        for layer in self.layers:
            rows = tuple(row for row in self.rows if layer.cell != "RNN" or row.engine != "highway_bp")
            yield LayerTiming(layer=layer, rows=rows, threads=self.threads, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the layers that were timed on ``device``."""
        results = {
            case.layer: r["results"].get("rows", []) for case in self.timing(device) for r in outcomes(records, case)
        }
        return LayerSection(results, self.rows, device, self.threads) if any(results.values()) else None


@dataclass(frozen=True)
class LayerSection(Section):
    """Times and memory of layers as shares of the plain layer's; layers whose timing failed have no rows."""

    results: Mapping[Layer, list[dict[str, Any]]]
    rows: tuple[Row, ...]
    device: str
    threads: int

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"recurrent layers, device: {self.device}, threads: {self.threads}"

    @property
    def legend(self) -> str:
        """Say what the figures and sizes are."""
        return (
            "Forward and backward pass; time as a multiple of the plain module's own, median of interleaved rounds, "
            "and in brackets peak memory as a multiple of its. Sizes: sequences, steps, units."
        )

    @property
    def _labels(self) -> list[str]:
        known = {label for timed in self._timed.values() for label in timed}
        return [name for name in (_LOOP, *(r.label for r in self.rows), _lean(self.rows)) if name in known]

    @property
    def _timed(self) -> dict[Layer, dict[str, _Timed]]:
        """What is known of each layer, by label."""
        return {
            layer: {r["label"]: _Timed.of(r, results[0]) for r in results}
            for layer, results in self.results.items()
            if results
        }

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a layer."""
        yield ["layer", "plain (ms)", *self._labels]
        timed = self._timed
        for layer in self.results:
            known = timed.get(layer, {})
            plain = f"{1e3 * known['plain'].time.median:.1f}" if known else "failed"
            yield [str(layer), plain, *(str(known[label]) if label in known else "–" for label in self._labels)]

    def verdicts(self) -> list[str]:
        """Return which engine is fastest on each layer, and which are slower than the plain module, in words."""
        timed = self._timed
        return [_verdict(timed[layer]) if layer in timed else "failed" for layer in self.results]

    def remarks(self) -> Iterator[str]:
        """Yield how far the rounds are apart."""
        ratios = {f"{label} on {layer}": t.ratio for layer, ts in self._timed.items() for label, t in ts.items()}
        yield verdict.steadiness(ratios)

    def plots(self) -> Plots:
        """Return what draws time and memory against steps, batch and units, where several were run."""
        plots: dict[str, Draw] = {}
        for size, name in _SIZES.items():
            if swept := _swept(list(self._timed), size):
                others = ", ".join(f"{getattr(swept[0], other)} {_SIZES[other]}" for other in _SIZES if other != size)
                where = f"{swept[0].cell}, {others}, {self.device}, {self.threads} threads"
                plots[f"{where}: time against {name}"] = partial(self._draw_times, swept=swept, size=size)
                plots[f"{where}: memory against {name}"] = partial(self._draw_memory, swept=swept, size=size)
        return plots

    def _draw_times(self, axes: Axes, styles: Styles, swept: Sequence[Layer], size: str) -> None:
        self._draw(axes, styles, swept, size, lambda timed: timed.ratio.bar, "time")

    def _draw_memory(self, axes: Axes, styles: Styles, swept: Sequence[Layer], size: str) -> None:
        self._draw(axes, styles, swept, size, lambda timed: (timed.memory, nan, nan), "peak memory")

    def _draw(
        self,
        axes: Axes,
        styles: Styles,
        swept: Sequence[Layer],
        size: str,
        figure: Callable[[_Timed], Bar],
        what: str,
    ) -> None:
        known = {layer: self._timed[layer] for layer in swept}
        lines = {
            label: {getattr(layer, size): figure(timed[label]) for layer, timed in known.items() if label in timed}
            for label in self._labels
        }
        draw_curves(axes, {label: line for label, line in lines.items() if line}, styles)
        count_axis(axes, [getattr(layer, size) for layer in swept], f"{_SIZES[size]} (count)")
        ratio_axis(axes, f"{what}, as a multiple of nn.{swept[0].cell}'s own (×)")
        add_legend(axes)

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        for layer, timed in self._timed.items():
            for label, t in timed.items():
                yield Fact.median(label, str(layer), "time of forward and backward", "s", t.time)
                yield Fact.median(label, str(layer), "time of forward and backward", "× plain", t.ratio)
                yield Fact(label, str(layer), "peak memory", "MiB", t.bytes / 2**20)
                yield Fact(label, str(layer), "peak memory", "× plain", t.memory)


class _Timed(NamedTuple):
    """What is known of an engine on a layer: seconds, multiples of the plain layer's time and memory, bytes."""

    time: Spread
    ratio: Spread
    memory: float
    bytes: float

    @classmethod
    def of(cls, result: Mapping[str, Any], plain: Mapping[str, Any]) -> _Timed:
        time, ratio = (Spread.recorded(result, name) for name in ("time", "ratio"))
        return cls(time, ratio, result["peak_memory"] / plain["peak_memory"], result["peak_memory"])

    def __str__(self) -> str:
        return f"{self.ratio.median:.2f} [{self.memory:.1f}]"


def _verdict(timed: Mapping[str, _Timed]) -> str:
    plain, *_ = timed
    known = {label: t.ratio for label, t in timed.items() if label not in (plain, _LOOP)}
    fastest = min(known, key=lambda label: known[label].median)
    words = f"fastest is {fastest}, {verdict.speed(known[fastest], 'the plain layer')}"
    slower = ", ".join(f"{label} ({ratio.median:.2f}×)" for label, ratio in known.items() if ratio.low > 1)
    return f"{words}; slower: {slower}" if slower else words


def _swept(layers: Sequence[Layer], size: str) -> list[Layer]:
    """Return the largest number of ``layers`` that differ in ``size`` alone, ascending; none if there are no two."""
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        key = tuple(value for name, value in asdict(layer).items() if name != size)
        groups.setdefault(key, []).append(layer)
    largest = max(groups.values(), key=len, default=[])
    return sorted(largest, key=attrgetter(size)) if len(largest) > 1 else []


def _lean(rows: tuple[Row, ...]) -> str:
    return f"{rows[0].label}, lean"
