"""How close engines come to the exact gradients of a trained net, and in which time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from gradfree.benchmarks.maps.deep_steps import PLAIN
from gradfree.benchmarks.maps.trained_steps import TrainedStep
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import MEMORY, Timings, times

_COTANGENTS, _GRADIENT = "cosine of the cotangents", "cosine of the gradient"
_AWAY = "1 − cosine of the cotangents"
_SHARE = times(PLAIN)
_ROUNDING = 1e-6
"""Above which 1 − cosine is no rounding."""


@dataclass(frozen=True)
class Closeness(Timings[Task]):
    """An engine over single links and over segments, on one trained net."""

    metric: ClassVar[str] = "time of forward and backward"

    timed = TrainedStep

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes, and how close it comes."""
        yield from super().cost(cost, results)
        if "cotangents" in cost:
            yield fact(_COTANGENTS, "1", cost["cotangents"])
            yield fact(_AWAY, "1", max(1 - cost["cotangents"], _ROUNDING))
        if "cosine" in cost:
            yield fact(_GRADIENT, "1", cost["cosine"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table, a row an engine, and the chart of closeness against time."""
        (task,) = self.subjects
        share = estimates(facts, metric=self.metric, unit=_SHARE)
        return Section(
            title=f"{task.name}: {task.architecture}, {task.steps} steps of training, device: {facts['device'][0]}, "
            f"threads: {self.threads}",
            facts=facts,
            columns=[
                column("time (×)", self.metric, unit=_SHARE),
                column("memory (×)", MEMORY, unit=_SHARE),
                column("cotangents", _COTANGENTS, "{value:.4f}"),
                column("gradient", _GRADIENT, "{value:.4f}"),
            ],
            legend=f"Trained by backpropagation, {task.batch_size} a batch. ×: forward and backward pass on one batch "
            "as a multiple of plain eager backpropagation's, median of interleaved rounds, and peak memory. "
            "Cotangents, gradient: cosine of those of all states, and of all parameters, with the exact ones.",
            remarks=[self._at_equal_time(facts), verdict.steadiness(share), *self.failures(facts)],
            charts=[
                Chart(
                    f"{task.name}, {facts['device'][0]}: closeness against time",
                    points(facts, Figure(self.metric, unit=_SHARE), Figure(_AWAY)),
                    Axis("time, as a multiple of eager backprop's (×)"),
                    Axis(_AWAY, "log"),
                    "solid",
                )
            ],
        )

    def _at_equal_time(self, facts: pl.DataFrame) -> str:
        """Say beside which rows over single links no segments are at least as close in no more time, by the medians."""
        time = estimates(facts, metric=self.metric, unit=_SHARE)
        close = {label: cosine.value for label, cosine in estimates(facts, metric=_COTANGENTS).items()}
        single = [row.label for row in self.rows if row.label in close and "segments" not in row.options]
        others = [label for label in close if label not in single]
        ahead = [
            label
            for label in single
            if not any(close[o] >= close[label] and time[o].value <= time[label].value for o in others)
        ]
        if len(ahead) == len(single):
            return "In the time of single links no segments are as close."
        words = "but for " + ", ".join(ahead) if ahead else "at every k"
        return f"In the time of single links some segments are at least as close, {words}."
