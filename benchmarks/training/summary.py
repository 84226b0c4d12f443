"""Engines compared on a task: the figures of all runs, as a table, in words and as plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle
from math import isnan, nan
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patheffects import withStroke

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import (
    Styles,
    add_legend,
    draw_level,
    draw_rows,
    iterations_axis,
    log_axis,
    score_axis,
)
from gradfree.benchmarks.tables.estimates import Estimate, Spread, paired, pareto_front
from gradfree.benchmarks.tables.section import Draw, Fact, Plots, Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.row_summary import RowSummary

_CORNERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))
"""Beside a point, to the right and up: for the highest line with iterations, then for others from the lowest on."""
_SHADE = 0.7
_FAR = 10.0
"""How many times the least error is the greatest where the axis is logarithmic."""
_ROUNDING = 1e-6
"""1 − cosine of what is exact but for rounding is below."""
_DISTANCE = "1 − cosine of the gradient and the exact one"


@dataclass(frozen=True)
class Summary(Section):
    """What is known of the engines on one task and device; the first row is the baseline.

    The grid has the learning rates, in ascending order, that each row's own was chosen from; empty if it was not.
    """

    task: Task
    grid: tuple[float, ...]
    device: str
    seeds: int
    rows: tuple[RowSummary, ...]
    environment: dict[str, Any]

    @property
    def legend(self) -> str:
        """Say what the signs and columns mean."""
        baseline, name = self.rows[0], self.task.score.name
        absolute = "" if isnan(baseline.time.median) else f" ({_milliseconds(baseline.time)})"
        legend = (
            f"±: 95 % confidence interval of the mean over seeds (Student's t, n = {self.seeds}). ×: as a multiple of "
            f"the first row's, for one training step{absolute}; median and quartiles of interleaved rounds. Cosine: "
            "between the engine's gradient and exact backpropagation's, mean over the training. In words: difference "
            f"in test {name} to the first row's, seed by seed."
        )
        if self.grid:
            legend += f" Rate: the learning rate of {self._rates} that did best on validation data, with another seed."
        return legend

    @property
    def title(self) -> str:
        """Say what was compared."""
        task = self.task
        return (
            f"{task.name}: {task.model}, {task.budget}, seeds: {self.seeds}, "
            f"device: {self.environment['device']}, threads: {self.environment['threads']}"
        )

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and its rows."""
        yield [
            "engine",
            self._scored,
            "step time (×)",
            "quartiles",
            "peak memory (MiB)",
            "peak memory (×)",
            "cosine",
            *(["rate"] if self.grid else []),
        ]
        for row in self.rows:
            ratio, memory = row.ratio, row.memory / self.rows[0].memory
            cells = [
                str(row.score),
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f}–{ratio.high:.2f}",
                f"{row.mebibytes:.1f}",
                f"{memory:.2f}",
                f"{row.cosine:.3f}",
                *([f"{row.learning_rate:g}"] if self.grid else []),
            ]
            if row.test and isnan(row.score.mean):
                cells[0] = "diverged"
            elif row.errors and not row.test:
                cells[0] = "failed"
            yield [row.label, *(cell.replace("nan–nan", "–").replace("nan", "–") for cell in cells)]

    @property
    def _scored(self) -> str:
        """The heading of the test scores."""
        return f"test {self.task.score.name} ({self.task.score.unit})"

    def scores(self, column: str) -> Mapping[str, Mapping[int, float]]:
        """Return the test scores by row and seed."""
        return {row.label: row.test for row in self.rows} if column == self._scored else {}

    def verdicts(self) -> list[str]:
        """Return speed, memory and score of each row beside the baseline's, in words."""
        return [self._verdict(row) for row in self.rows]

    def _verdict(self, row: RowSummary) -> str:
        baseline = self.rows[0]
        if row is baseline:
            return "; ".join(filter(None, ["the baseline", row.failures]))
        speed = verdict.speed(row.ratio, baseline.label)
        memory = f"{row.memory / baseline.memory:.2f}"
        if memory not in ("nan", "1.00"):
            speed += f" at {memory}× the memory"
        score = self.task.score
        parts = [f"{speed}, {verdict.score(score.name, self.difference(row), self.higher_is_better)}", row.failures]
        return "; ".join(filter(None, parts))

    def difference(self, row: RowSummary) -> Estimate:
        """Return how much more than the baseline's the row's test score is, seed by seed."""
        return paired(row.test, self.rows[0].test)

    @cached_property
    def higher_is_better(self) -> bool:
        """Whether a higher score is."""
        return bool(self.task.score.metric().higher_is_better)

    @cached_property
    def front(self) -> list[RowSummary]:
        """The rows on the Pareto front of step time and test score, by time."""
        goodness = self.task.score.goodness
        return [self.rows[n] for n in pareto_front([(r.ratio.median, goodness(r.score.mean)) for r in self.rows])]

    def remarks(self) -> Iterator[str]:
        """Yield the Pareto front, and which engines may do better at another learning rate."""
        if self.front:
            front = ", ".join(row.label for row in self.front)
            yield f"Pareto front of step time and test {self.task.score.name}, fastest first: {front}."
        ends = self.grid[:1] + self.grid[-1:]
        edge = [f"{r.label} ({r.learning_rate:g})" for r in self.rows if r.learning_rate in ends]
        if edge:
            yield f"Best at the edge of the learning rates {self._rates}, maybe better beyond: {', '.join(edge)}."

    @property
    def _rates(self) -> str:
        return ", ".join(f"{rate:g}" for rate in self.grid)

    def plots(self) -> Plots:
        """Return what draws the score against the step time, and the gradients' distance in angle against any k."""
        where, plots = f"{self.task.name}, {self.task.budget}, {self.device}", dict[str, Draw]()
        if self.front:
            plots[f"{where}: {self.task.score.name} against step time"] = self._draw_scores
        if len({row.row.iterations for row in self._inexact} - {None}) > 1:
            plots[f"{where}: gradients against iterations"] = self._draw_cosines
        elif self._inexact:
            plots[f"{where}: gradients by engine"] = self._draw_cosines_by_engine
        return plots

    @property
    def _inexact(self) -> list[RowSummary]:
        """The rows whose gradients are not exact: others have no place on the logarithmic axis."""
        return [row for row in self.rows if _is_inexact(row)]

    def _draw_scores(self, axes: Axes, styles: Styles) -> None:
        baseline = self.rows[0]
        axes.axhspan(
            baseline.score.low, baseline.score.high, color="0.93", zorder=0, label=f"{baseline.label}'s interval"
        )
        series = _series(self.rows)
        looks = styles(series)
        for label, look in looks.items():
            _draw_points(axes, series[label], label, look)
        swept = [label for label, rows in series.items() if rows[0].row.iterations is not None]
        swept.sort(key=lambda label: fmean(r.score.mean for r in series[label]))
        for label, corner in zip([*swept[-1:], *swept[:-1]], cycle(_CORNERS), strict=False):
            _name_iterations(axes, series[label], looks[label]["color"], corner)
        front = [row.ratio.median for row in self.front], [row.score.mean for row in self.front]
        axes.step(*front, where="post", color="0.5", linestyle=":", zorder=1)
        axes.plot(*front, "o", markersize=13, markerfacecolor="none", markeredgecolor="0.5", label="Pareto front")
        axes.set_xlabel(f"step time, as a multiple of {baseline.label}'s (×)")
        axes.margins(0.1)
        means = [row.score.mean for row in self.rows if not isnan(row.score.mean)]
        if not self.higher_is_better and 0.0 < _FAR * min(means) < max(means):
            log_axis(axes, "")
            axes.set_ylim(min(means) / 2.0)
        score_axis(axes, "test", self.task.score)
        add_legend(axes)

    def _draw_cosines(self, axes: Axes, styles: Styles) -> None:
        """Draw engines with iterations as lines, others as levels."""
        series = _series(self._inexact)
        for label, look in styles(series).items():
            points = [(k, 1 - r.cosine) for r in series[label] if (k := r.row.iterations) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **look)
            else:
                draw_level(axes, 1 - series[label][0].cosine, label, look)
        iterations_axis(axes, [k for row in self._inexact if (k := row.row.iterations) is not None])
        log_axis(axes, _DISTANCE)
        add_legend(axes)

    def _draw_cosines_by_engine(self, axes: Axes, styles: Styles) -> None:
        draw_rows(axes, {row.label: (1 - row.cosine, nan, nan) for row in self._inexact}, "engine", styles)
        log_axis(axes, _DISTANCE)

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        name, unit, baseline = self.task.score.name, self.task.score.unit, self.rows[0]
        for row in self.rows:
            label = row.label
            validation = Estimate.of(list(row.validation.values()))
            yield Fact.mean(label, "", f"test {name}", unit, row.score)
            yield Fact.mean(label, "", f"test {name}, difference to {baseline.label}", unit, self.difference(row))
            yield Fact.mean(label, "", f"validation {name}", unit, validation)
            yield Fact.median(label, "", "step time", "s", row.time)
            yield Fact.median(label, "", "step time", f"× {baseline.label}", row.ratio)
            yield Fact(label, "", "peak memory", "MiB", row.mebibytes)
            yield Fact(label, "", "peak memory", f"× {baseline.label}", row.memory / baseline.memory)
            yield Fact(label, "", "cosine with the exact gradient", "1", row.cosine, seeds=len(row.test))
            yield Fact(label, "", "learning rate", "1", row.learning_rate)
            yield Fact(label, "", "on the Pareto front", "1", float(row in self.front))
            yield Fact(label, "", "failed runs", "1", len(row.errors))


def summarise(
    task: Task,
    rows: Sequence[Row],
    grid: tuple[float, ...],
    learning_rates: Sequence[float],
    runs: Sequence[list[Record]],
    speed: Sequence[Record],
) -> Summary | None:
    """Return the figures of one task on one device; ``None`` if there are no records.

    Args:
        task: what was trained.
        rows: the engines.
        grid: the learning rates that each row's own was chosen from; empty if it was not.
        learning_rates: of each row's training runs; NaN if yet to be chosen.
        runs: the records of each row's training runs, failed ones too.
        speed: the record of their costs, if there is one.
    """
    found = [*speed, *chain(*runs)]
    if not found:
        return None
    timed = speed[0]["results"]["rows"] if speed else [{}] * len(rows)
    costs = [cost if "time" in cost else None for cost in timed]
    return Summary(
        task=task,
        grid=grid,
        device=found[0]["config"]["device"],
        seeds=max(map(len, runs)),
        rows=tuple(map(RowSummary.of, rows, learning_rates, runs, costs)),
        environment=found[0]["environment"],
    )


def _draw_points(axes: Axes, rows: Sequence[RowSummary], label: str, look: Mapping[str, Any]) -> None:
    times, scores = [r.ratio.median for r in rows], [r.score.mean for r in rows]
    time_errors = np.abs(np.transpose([(r.ratio.low, r.ratio.high) for r in rows]) - times)
    axes.plot(times, scores, color=look["color"], alpha=0.3)
    margins = [r.score.margin for r in rows]
    axes.errorbar(times, scores, margins, time_errors, linestyle="", capsize=3, label=label, **look)


def _name_iterations(axes: Axes, rows: Sequence[RowSummary], color: str, corner: tuple[int, int]) -> None:
    """Write k into one corner beside the points, in their color, but dark enough to be read."""
    right, up = corner
    for r in rows:
        axes.annotate(
            f"k={r.row.iterations}",
            (r.ratio.median, r.score.mean),
            (7 * right, 5 * up),
            textcoords="offset points",
            ha="left" if right > 0 else "right",
            va="bottom" if up > 0 else "top",
            fontsize="small",
            color=tuple(_SHADE * part for part in to_rgb(color)),
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )


def _series(rows: Sequence[RowSummary]) -> dict[str, list[RowSummary]]:
    """Return the rows that make one line, by its label."""
    series: dict[str, list[RowSummary]] = {}
    for r in rows:
        series.setdefault(r.row.series, []).append(r)
    return series


def _is_inexact(r: RowSummary) -> bool:
    """Return whether the row's gradient is another than the exact one by more than rounding; not if nobody knows."""
    return 1 - r.cosine >= _ROUNDING


def _milliseconds(time: Spread) -> str:
    return f"{1e3 * time.median:.1f} ms, quartiles {1e3 * time.low:.1f} and {1e3 * time.high:.1f}"
