"""What the reverse scan costs, in copies of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from torch import Tensor

from gradfree.algebra.reference_scans import ANY_FACTORS, CONSTANT_FACTORS
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import Styles, add_legend, draw_curves, ratio_axis
from gradfree.benchmarks.tables.estimates import Spread
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.timing.speed import Errors, Timing, Turns

_TARGET = 3.0


@dataclass(frozen=True)
class Operands:
    """Terms (steps, batch, units) in float32, and factors: one a unit, or as many as terms."""

    steps: int
    batch: int
    units: int
    constant: bool

    @property
    def size(self) -> str:
        """The shape."""
        return f"({self.steps}, {self.batch}, {self.units})"

    @property
    def kind(self) -> str:
        """What the factors are."""
        return "constant" if self.constant else "of each step"

    @property
    def methods(self) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        """Whatever can be used."""
        return CONSTANT_FACTORS if self.constant else ANY_FACTORS


@dataclass(frozen=True, kw_only=True)
class ScanTiming(Timing[Callable[[], Tensor]]):
    """Time of every method, on the same operands."""

    kind: ClassVar[str] = "scan"
    runs: ClassVar[int] = 10
    operands: Operands

    @property
    def topic(self) -> str:
        """The shape."""
        return f"scan {self.operands.size}"

    @property
    def sides(self) -> str:
        """The factors."""
        return f"factors {self.operands.kind}"

    def steps(self) -> Mapping[str, Callable[[], Callable[[], Tensor]]]:
        """Return what binds each method to the operands."""
        torch.manual_seed(self.seed)
        wanted = self.operands
        terms = torch.randn(wanted.steps, wanted.batch, wanted.units, device=self.device)
        factors = torch.rand(terms.shape[-1:] if wanted.constant else terms.shape, device=self.device)
        return {label: partial(partial, method, terms, factors) for label, method in wanted.methods.items()}

    def results(self, steps: Mapping[str, Any], turns: Turns, errors: Errors) -> dict[str, Any]:
        """Return the methods that work: a prototype may be missing, or fail in one version of torch."""
        return super().results(steps, turns, {})


@dataclass(frozen=True)
class ScanTimings(Part):
    """The reverse scan at several sizes.

    Attributes:
        sizes: T, B and H of each.
        threads: for torch to use.
    """

    sizes: tuple[tuple[int, int, int], ...]
    threads: int

    def timing(self, device: str) -> Iterator[ScanTiming]:
        """Yield one case a size and kind of factors."""
        for constant in (True, False):
            for size in self.sizes:
                yield ScanTiming(operands=Operands(*size, constant), threads=self.threads, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the sizes that were timed on ``device``."""
        results = {case.operands: r["results"]["rows"] for case in self.timing(device) for r in matching(records, case)}
        return ScanSection(results, device, self.threads) if results else None


@dataclass(frozen=True)
class ScanSection(Section):
    """Times in copies."""

    results: Mapping[Operands, list[dict[str, Any]]]
    device: str
    threads: int

    labels = 2
    legend = (
        "Time as a multiple of copying the terms (empty_like and copy_), median of interleaved rounds. Sizes: steps, "
        "sequences, units; float32. Factors: one a unit, or one a unit, sequence and step."
    )

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"reverse scan, device: {self.device}, threads: {self.threads}"

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and its rows."""
        _, *labels = CONSTANT_FACTORS
        yield ["size", "factors", "copy (µs)", *labels]
        for operands, results in self.results.items():
            figures = {r["label"]: f"{r['ratio']:.1f}" for r in results}
            copy = f"{1e6 * results[0]['time']:.0f}"
            yield [operands.size, operands.kind, copy, *(figures.get(label, "–") for label in labels)]

    def remarks(self) -> Iterator[str]:
        """Yield where the engines' scan takes more copies than it should, and how far the rounds are apart."""
        slow = [
            f"{operands.size}, {operands.kind} ({r['ratio']:.1f})"
            for operands, results in self.results.items()
            for r in results
            if r["label"] == "gradfree" and r["ratio"] > _TARGET
        ]
        if slow:
            yield f"gradfree's takes more than {_TARGET:.0f} copies at {'; '.join(slow)}."
        yield verdict.steadiness(
            {
                f"{r['label']} at {operands.size}, {operands.kind}": Spread.recorded(r, "ratio")
                for operands, results in self.results.items()
                for r in results
            }
        )

    def plots(self) -> Plots:
        """Return what draws the time against the size, by the number of elements."""
        return {
            f"factors {kind}, {self.device}: time against size": partial(self._draw, swept=swept)
            for constant, kind in ((True, "constant"), (False, "of each step"))
            if (swept := sorted((a for a in self.results if a.constant == constant), key=_elements))
        }

    def _draw(self, axes: Axes, styles: Styles, swept: Sequence[Operands]) -> None:
        _, *labels = CONSTANT_FACTORS
        ratios = [{r["label"]: Spread.recorded(r, "ratio").bar for r in self.results[a]} for a in swept]
        lines = {label: {n: known[label] for n, known in enumerate(ratios) if label in known} for label in labels}
        draw_curves(axes, {label: line for label, line in lines.items() if line}, styles)
        axes.axhline(_TARGET, color="0.7", linestyle=":", zorder=0, label=f"{_TARGET:.0f} copies")
        axes.set_xticks(range(len(swept)), [a.size for a in swept], rotation=20, ha="right", fontsize="small")
        axes.set_xlabel("size (steps, sequences, units), by number of elements")
        ratio_axis(axes, "time, in copies of the terms (×)")
        add_legend(axes)

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        for operands, results in self.results.items():
            where = f"{operands.size}, factors {operands.kind}"
            for r in results:
                yield Fact.median(r["label"], where, "time", "s", Spread.recorded(r, "time"))
                yield Fact.median(r["label"], where, "time", "× copy", Spread.recorded(r, "ratio"))


def _elements(operands: Operands) -> int:
    return operands.steps * operands.batch * operands.units
