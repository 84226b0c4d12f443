"""Engines compared on a task: the figures of all runs, as a table, in words and as plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isnan, nan
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradfree.benchmarks.case import Row
from gradfree.benchmarks.records import Record
from gradfree.benchmarks.section import Section
from gradfree.benchmarks.tasks import Task

_MIB = 2**20


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation; NaN where there are too few values."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from ``values``, one a seed."""
        return cls(_mean(values), stdev(values) if len(values) > 1 else nan)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.spread:.2f}"


@dataclass(frozen=True)
class RowSummary:
    """What is known of one engine on one task; NaN where no record tells.

    Attributes:
        row: the engine.
        learning_rate: that it was trained with.
        validation: score.
        test: score.
        cosine: of its gradients and exact ones, mean over training steps and seeds.
        ratio: of its step time to the baseline's, median.
        ratio_quartiles: likewise.
        memory: peak of a step, in bytes.
    """

    row: Row
    learning_rate: float
    validation: Estimate
    test: Estimate
    cosine: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    memory: float


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
        legend = (
            "±: sample standard deviation over seeds. ×: as a multiple of the first row's, for one training step. "
            "Cosine: between the engine's gradient and exact backpropagation's, mean over the training."
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
        score = self.task.score
        yield [
            "engine",
            f"test {score.name} ({score.unit})",
            f"validation {score.name}",
            "step time (×)",
            "peak memory (MiB)",
            "peak memory (×)",
            "cosine",
            *(["rate"] if self.grid else []),
        ]
        baseline = self.rows[0]
        for row in self.rows:
            figures = [f"{row.ratio:.2f}", f"{row.memory / _MIB:.1f}", f"{row.memory / baseline.memory:.2f}"]
            cells = [str(row.test), str(row.validation), *figures, f"{row.cosine:.3f}"]
            if self.grid:
                cells.append(f"{row.learning_rate:g}")
            yield [row.row.label, *(cell.replace("nan", "–") for cell in cells)]

    def remarks(self) -> Iterator[str]:
        """Yield which engines cost more time than the baseline, and which train as well."""
        baseline, *others = self.rows
        name, score = baseline.row.label, self.task.score
        # Between the quartiles of the ratio it is anyone's guess.
        slower = [f"{r.row.label} ({r.ratio:.2f}×)" for r in others if r.ratio_quartiles[0] > 1]
        faster = [f"{r.row.label} ({r.ratio:.2f}×)" for r in others if r.ratio_quartiles[1] < 1]
        if slower:
            yield f"Slower than {name} per step: {', '.join(slower)}."
        if faster:
            yield f"Faster than {name} per step: {', '.join(faster)}."
        ends = self.grid[:1] + self.grid[-1:]
        edge = [f"{r.row.label} ({r.learning_rate:g})" for r in self.rows if r.learning_rate in ends]
        if edge:
            yield f"Best at the edge of the learning rates {self._rates}, maybe better beyond: {', '.join(edge)}."
        if isnan(baseline.validation.spread):
            return
        level = f"{name}'s validation {score.name} ({baseline.validation} {score.unit})"
        equal = [r.row.label for r in others if self._as_good(r)]
        worse = [r.row.label for r in others if r.row.label not in equal]
        if equal:
            yield f"Within one spread of {level}, or better: {', '.join(equal)}."
        if worse:
            yield f"Worse than {level} by more than its spread: {', '.join(worse)}."

    def _as_good(self, row: RowSummary) -> bool:
        baseline, goodness = self.rows[0].validation, self.task.score.goodness
        return goodness(baseline.mean) - goodness(row.validation.mean) <= baseline.spread

    @property
    def _rates(self) -> str:
        return ", ".join(f"{rate:g}" for rate in self.grid)

    def draw(self, top: Axes, bottom: Axes) -> None:
        """Draw the score against the step time, and the gradients' distance in angle against k."""
        top.set_title(f"{self.task.name}, {self.task.model}, {self.seeds} seeds, {self.device}")
        _draw_scores(top, self)
        _draw_cosines(bottom, self)


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
        runs: the records of each row's training runs.
        speed: the record of their costs, if there is one.
    """
    found = [*speed, *chain(*runs)]
    if not found:
        return None
    costs = speed[0]["results"]["rows"] if speed else [None] * len(rows)
    return Summary(
        task=task,
        grid=grid,
        device=found[0]["config"]["device"],
        seeds=max(map(len, runs)),
        rows=tuple(map(_row_summary, rows, learning_rates, runs, costs)),
        environment=found[0]["environment"],
    )


def _row_summary(row: Row, learning_rate: float, runs: Sequence[Record], cost: dict[str, Any] | None) -> RowSummary:
    results = [run["results"] for run in runs]
    probes = [probe for result in results for probe in result["fidelity"]]
    return RowSummary(
        row=row,
        learning_rate=learning_rate,
        validation=Estimate.of([result["validation"] for result in results]),
        test=Estimate.of([result["test"] for result in results]),
        cosine=_mean([probe["cosine"] for probe in probes]),
        ratio=cost["ratio"] if cost else nan,
        ratio_quartiles=tuple(cost["ratio_quartiles"]) if cost else (nan, nan),
        memory=cost["peak_memory"] if cost else nan,
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan


def _draw_scores(axes: Axes, summary: Summary) -> None:
    baseline, score = summary.rows[0], summary.task.score
    low, high = baseline.test.mean - baseline.test.spread, baseline.test.mean + baseline.test.spread
    axes.axhspan(low, high, color="0.93", label=f"{baseline.row.label}, mean ± spread over seeds")
    for i, (label, rows) in enumerate(_series(summary).items()):
        _draw_points(axes, rows, label, f"C{i}")
    better = "higher" if score.metric().higher_is_better else "lower"
    axes.set_xlabel(f"step time, as a multiple of {baseline.row.label}'s")
    axes.set_ylabel(f"test {score.name} ({score.unit}), {better} is better")
    axes.margins(x=0.1)
    axes.legend()


def _draw_points(axes: Axes, rows: Sequence[RowSummary], label: str, color: str) -> None:
    times, scores = [r.ratio for r in rows], [r.test.mean for r in rows]
    time_errors = np.abs(np.transpose([r.ratio_quartiles for r in rows]) - times)
    axes.plot(times, scores, color=color, alpha=0.3)
    axes.errorbar(times, scores, [r.test.spread for r in rows], time_errors, "o", capsize=3, color=color, label=label)
    for r in rows:
        if (k := _iterations(r)) is not None:
            axes.annotate(f"k={k}", (r.ratio, r.test.mean), (6, 6), textcoords="offset points")


def _draw_cosines(axes: Axes, summary: Summary) -> None:
    """Draw engines with iterations as lines, others across all k; backprop is exact and has no place on a log axis."""
    for i, (label, rows) in enumerate(_series(summary).items()):
        points = [(k, 1 - r.cosine) for r in rows if (k := _iterations(r)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{i}", label=label)
        elif rows[0].row.engine != "backprop":
            axes.axhline(1 - rows[0].cosine, color=f"C{i}", linestyle="--", label=label)
    axes.set_yscale("log")
    axes.set_xlabel("iterations k")
    axes.set_ylabel("1 − cosine of the gradient and the exact one")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def _series(summary: Summary) -> dict[str, list[RowSummary]]:
    """Return the rows that make one line, by its label: an engine at several k, or any other row by itself."""
    series: dict[str, list[RowSummary]] = {}
    for r in summary.rows:
        label = r.row.label if _iterations(r) is None else f"{r.row.engine} with k iterations"
        series.setdefault(label, []).append(r)
    return series


def _iterations(r: RowSummary) -> int | None:
    return r.row.options.get("iterations")
