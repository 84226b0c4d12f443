"""What a forward and backward pass of one recurrent layer costs with each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from gradfree.benchmarks.case import Case, Row
from gradfree.benchmarks.memory import peak_memory
from gradfree.benchmarks.part import Part, matching
from gradfree.benchmarks.records import Record
from gradfree.benchmarks.section import Section
from gradfree.benchmarks.speed import interleaved, statistics

_MODULES: dict[str, Callable[..., nn.Module]] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
_CELLS: dict[str, Callable[..., nn.Module]] = {"GRU": nn.GRUCell, "LSTM": nn.LSTMCell, "RNN": nn.RNNCell}


@dataclass(frozen=True)
class Layer:
    """A layer of torch's, with a batch of sequences of as many features as it has units."""

    cell: str
    batch: int
    steps: int
    units: int

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.steps}, {self.units})"


@dataclass(frozen=True, kw_only=True)
class LayerCase(Case):
    """A measurement of one layer.

    Attributes:
        layer: what is run.
        rows: the engines.
        threads: for torch to use.
    """

    alone: ClassVar[bool] = True
    layer: Layer
    rows: tuple[Row, ...]
    threads: int

    @property
    def topic(self) -> str:
        """The layer."""
        return str(self.layer)


@dataclass(frozen=True, kw_only=True)
class LayerTiming(LayerCase):
    """Time and peak memory of a layer's forward and backward pass in turns: plain, as a loop over cells, by engine.

    A GRU is also run with the first engine in its lean form; other layers have no other form.
    """

    kind: ClassVar[str] = "layer"

    @property
    def subject(self) -> str:
        """All rows."""
        return f"all rows, {self.threads} threads"

    def run(self) -> dict[str, Any]:
        """Measure; return for each row its times in seconds, ratios to the plain layer's and peak memory in bytes."""
        steps = {"plain": Pass(self), "loop over cells": _Loop(self)}
        steps |= {row.label: Pass(self, row) for row in self.rows}
        if self.layer.cell == "GRU":
            steps[_lean(self.rows)] = Pass(self, self.rows[0], lean=True)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        times = interleaved(list(steps.values()))
        torch.set_num_threads(before)
        return {
            "rows": [
                {"label": label, "peak_memory": peak_memory(step, self.device), **statistics(own, times[0])}
                for (label, step), own in zip(steps.items(), times, strict=True)
            ]
        }


class Pass:
    """A forward and backward pass of the layer, with one row's engine or none."""

    def __init__(self, case: LayerCase, row: Row | None = None, lean: bool = False):
        torch.manual_seed(case.seed)
        layer = case.layer
        shape = (layer.batch, layer.steps, layer.units)
        self.module = _MODULES[layer.cell](layer.units, layer.units, batch_first=True).to(case.device)
        self.x = torch.randn(shape, device=case.device, requires_grad=True)
        self.cotangent = torch.randn(shape, device=case.device)
        self.run: Callable[[Tensor], Tensor] = lambda x: self.module(x)[0]
        if row is not None:
            row.create_engine().attach(self.module, [""], lean=lean)

    def __call__(self) -> None:
        """Run it."""
        self.run(self.x).backward(self.cotangent)
        self.x.grad = None
        self.module.zero_grad()

    @torch.no_grad()
    def forward_alone(self) -> None:
        """Run the forward pass, without a graph."""
        self.run(self.x)


class _Loop(Pass):
    """The same as a Python loop over torch's cell."""

    def __init__(self, case: LayerCase):
        super().__init__(case)
        units = case.layer.units
        self.module = _CELLS[case.layer.cell](units, units).to(case.device)
        self.run = self._unrolled

    def _unrolled(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.module(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


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

    def timing(self, device: str) -> Iterator[Case]:
        """Yield one case a layer; cells without a gate are not run with engines that need one."""
        for layer in self.layers:
            rows = tuple(row for row in self.rows if layer.cell != "RNN" or row.engine != "highway_bp")
            yield LayerTiming(layer=layer, rows=rows, threads=self.threads, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the layers that were timed on ``device``."""
        found = {case.layer: list(matching(records, case)) for case in self.timing(device)}  # type: ignore[attr-defined]
        results = {layer: record[0]["results"]["rows"] for layer, record in found.items() if record}
        return LayerSection(results, self.rows, device, self.threads) if results else None


@dataclass(frozen=True)
class LayerSection(Section):
    """Times and memory of layers as shares of the plain layer's."""

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

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a layer."""
        labels = ["loop over cells", *(row.label for row in self.rows), _lean(self.rows)]
        yield ["layer", "plain (ms)", *labels]
        for layer, results in self.results.items():
            plain = results[0]
            figures = {r["label"]: f"{r['ratio']:.2f} [{r['peak_memory'] / plain['peak_memory']:.1f}]" for r in results}
            yield [str(layer), f"{1e3 * plain['time']:.1f}", *(figures.get(label, "–") for label in labels)]

    def remarks(self) -> Iterator[str]:
        """Yield where the engines are slower than the plain layer beyond doubt."""
        for layer, results in self.results.items():
            slower = [f"{r['label']} ({r['ratio']:.2f}×)" for r in results[2:] if r["ratio_quartiles"][0] > 1]
            if slower:
                yield f"Slower than the plain {layer}: {', '.join(slower)}."

    def draw(self, top: Axes, bottom: Axes) -> None:
        """Draw time and memory against the number of steps, for the sizes that were run at several."""
        sizes = [(layer.cell, layer.batch, layer.units) for layer in self.results]
        cell, batch, units = max(sizes, key=sizes.count)
        swept = sorted((a for a, s in zip(self.results, sizes, strict=True) if s == (cell, batch, units)), key=_steps)
        for n, label in enumerate(["loop over cells", *(row.label for row in self.rows)]):
            found = {layer: {r["label"]: r for r in self.results[layer]} for layer in swept}
            points = [(layer.steps, f[label], f["plain"]) for layer, f in found.items() if label in f]
            steps = [t for t, *_ in points]
            top.plot(steps, [r["ratio"] for _, r, _ in points], "o-", label=label, color=f"C{n}")
            memory = [r["peak_memory"] / plain["peak_memory"] for _, r, plain in points]
            bottom.plot(steps, memory, "o-", label=label, color=f"C{n}")
        top.set_title(f"{cell}, {batch} sequences, {units} units, {self.device}, {self.threads} threads")
        for axes, what in ((top, "time"), (bottom, "peak memory")):
            axes.axhline(1.0, color="0.7", zorder=0)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xlabel("steps T")
            axes.set_ylabel(f"{what}, as a multiple of nn.{cell}'s own")
            axes.legend(fontsize="small")


def _lean(rows: tuple[Row, ...]) -> str:
    return f"{rows[0].label}, lean"


def _steps(layer: Layer) -> int:
    return layer.steps
