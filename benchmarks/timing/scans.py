"""What the reverse scan costs, in copies of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradfree.algebra.reference_scans import ANY_FACTORS, CONSTANT_FACTORS
from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import estimates
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import Errors, Timing, Timings, Turns, times

_OURS = "gradfree"
_RATIO = times("copy")
_KINDS = ("constant", "of each step")
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
        return _KINDS[not self.constant]

    def __str__(self) -> str:
        return f"{self.size}, {self.kind}"

    @property
    def methods(self) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        """Whatever can be used."""
        return CONSTANT_FACTORS if self.constant else ANY_FACTORS


@dataclass(frozen=True, kw_only=True)
class ScanTiming(Timing[Callable[[], Tensor]]):
    """Time of every method, on the same operands."""

    kind: ClassVar[str] = "scan"
    topic_field: ClassVar[str] = "operands"
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
class ScanTimings(Timings[Operands]):
    """Methods for the reverse scan on several operands."""

    metric: ClassVar[str] = "time"

    timed = ScanTiming

    def where(self, case: Case) -> dict[str, Any]:
        """Return the operands of a case, and how many terms they have."""
        wanted = case.about
        return {"setting": str(wanted), "at": float(wanted.steps * wanted.batch * wanted.units)}

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of times in copies, a row a size and kind of factors."""
        _, *labels = CONSTANT_FACTORS
        ratios = {str(a): estimates(facts, metric=self.metric, unit=_RATIO, setting=str(a)) for a in self.subjects}
        slow = [f"{a} ({t[_OURS].value:.1f})" for a, t in ratios.items() if _OURS in t and t[_OURS].value > _TARGET]
        limit = f"gradfree's takes more than {_TARGET:.0f} copies at {'; '.join(slow)}."
        spreads = {f"{label} at {a}": ratio for a, known in ratios.items() for label, ratio in known.items()}
        return Section(
            title=f"reverse scan, device: {facts['device'][0]}, threads: {self.threads}",
            facts=facts,
            names={"size, factors": "setting"},
            columns=[
                column("copy (µs)", self.metric, "{value:.0f}", "s", factor=1e6, row="copy"),
                *(column(label, self.metric, "{value:.1f}", _RATIO, row=label) for label in labels),
            ],
            legend="Time as a multiple of copying the terms (empty_like and copy_), median of interleaved rounds. "
            "Sizes: steps, sequences, units; float32. Factors: one a unit, or one a unit, sequence and step.",
            remarks=[*([limit] if slow else []), verdict.steadiness(spreads), *self.failures(facts)],
            charts=[chart for kind in _KINDS if (chart := self._chart(facts, kind)).points.height],
        )

    def _chart(self, facts: pl.DataFrame, kind: str) -> Chart:
        """Draw the time against the size, by the number of elements."""
        swept = facts.filter(pl.col("setting").str.ends_with(kind), pl.col("row") != "copy").sort("at")
        return Chart(
            f"factors {kind}, {facts['device'][0]}: time against size",
            points(swept, "setting", Figure(self.metric, unit=_RATIO)).with_columns(
                pl.col("x").str.strip_suffix(f", {kind}")
            ),
            Axis("size (steps, sequences, units), by number of elements", "names"),
            Axis("time, in copies of the terms (×)", "log"),
            True,
            rules={f"{_TARGET:.0f} copies": _TARGET},
        )
