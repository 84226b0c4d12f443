"""How soon engines reach a validation score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend, score_axis
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.training.comparison import Comparison


@dataclass(frozen=True)
class TimeToTarget(Part):
    """The steps that a comparison's training runs take to a validation score, and the time of so many steps.

    It has no cases of its own. The time is the number of steps by the time of one, which is measured with nothing
    beside it: evaluations on the way, and runs beside each other, do not count.

    Attributes:
        comparison: whose tasks are evaluated on the way.
        target: the score.
    """

    comparison: Comparison
    target: float

    def timing(self, device: str) -> Iterator[Case]:
        """Yield nothing."""
        return iter(())

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the runs on ``device``, once steps have been timed."""
        comparison = self.comparison
        timed = [record for case in comparison.timing(device) for record in matching(records, case)]
        if not timed:
            return None
        cases = list(comparison.training(0, device, records))
        curves = [[r["results"]["curve"] for r in matching(records, case)] if case else [] for case in cases]
        times = [result.get("time", nan) for result in timed[0]["results"]["rows"]]
        rows = [Reach(*found, self._steps(found[2])) for found in zip(comparison.rows, times, curves, strict=True)]
        return TargetSection(self, rows, device)

    def _steps(self, curves: Sequence[list[dict[str, Any]]]) -> list[int | None]:
        """Return the step at which each run was first seen at the target, ``None`` for one that never was."""
        goodness = self.comparison.task.score.goodness
        target = goodness(self.target)
        reached = [[e["step"] + 1 for e in curve if goodness(e["validation"]) >= target] for curve in curves]
        return [steps[0] if steps else None for steps in reached]


@dataclass(frozen=True)
class Reach:
    """What is known of one engine's way to the target.

    Attributes:
        row: the engine.
        step_time: median, in seconds.
        curves: of each run, the validation score by step.
        steps: of each run, to the target.
    """

    row: Row
    step_time: float
    curves: Sequence[list[dict[str, Any]]]
    steps: Sequence[int | None]

    @property
    def mean_steps(self) -> float:
        """The mean number of steps; NaN if a run did not reach the target."""
        reached = [steps for steps in self.steps if steps is not None]
        return fmean(reached) if reached and len(reached) == len(self.steps) else nan

    @property
    def time(self) -> float:
        """The mean time in seconds; NaN if a run did not reach the target."""
        return self.mean_steps * self.step_time


@dataclass(frozen=True)
class TargetSection(Section):
    """Time to the target beside the time of a step."""

    part: TimeToTarget
    rows: Sequence[Reach]
    device: str

    @property
    def title(self) -> str:
        """Say what was compared."""
        task = self.part.comparison.task
        level = f"validation {task.score.name} {self.part.target:g} {task.score.unit}"
        return f"{task.name}: time to {level}, seeds: {max(len(row.steps) for row in self.rows)}, device: {self.device}"

    @property
    def legend(self) -> str:
        """Say what the columns mean."""
        evaluations = self.part.comparison.task.evaluations
        return (
            f"Steps: to the first of {evaluations} evaluations at the target, mean over seeds; "
            "time: so many steps, at the median time of one; ×: as a multiple of the first row's. "
            "Reached: runs that came there at all; where not all did, there is no mean."
        )

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row an engine."""
        yield ["engine", "step (ms)", "steps to target", "time to target (s)", "time (×)", "reached"]
        for row in self.rows:
            figures = [f"{1e3 * row.step_time:.2f}", f"{row.mean_steps:.0f}", f"{row.time:.2f}"]
            figures.append(f"{row.time / self.rows[0].time:.2f}")
            reached = sum(steps is not None for steps in row.steps)
            yield [row.row.label, *(f.replace("nan", "–") for f in figures), f"{reached} of {len(row.steps)}"]

    def remarks(self) -> Iterator[str]:
        """Yield which engines are there sooner than the baseline."""
        baseline, *others = self.rows
        sooner = [f"{row.row.label} ({row.time / baseline.time:.2f}×)" for row in others if row.time < baseline.time]
        if sooner:
            yield f"At the target sooner than {baseline.row.label}: {', '.join(sooner)}."

    def plots(self) -> Plots:
        """Return what draws the validation score against steps and against time, mean over seeds."""
        where = f"{self.part.comparison.task.name}, {self.device}"
        score = self.part.comparison.task.score.name
        return {
            f"{where}: {score} against steps": partial(self._draw, name="steps (count)", scale=lambda row: 1.0),
            f"{where}: {score} against time": partial(self._draw, name="time (s)", scale=lambda row: row.step_time),
        }

    def _draw(self, axes: Axes, styles: Styles, name: str, scale: Callable[[Reach], float]) -> None:
        looks = styles([row.row.label for row in self.rows])
        for row in self.rows:
            if row.curves:
                steps = [scale(row) * (evaluation["step"] + 1) for evaluation in row.curves[0]]
                scores = [fmean(e["validation"] for e in column) for column in zip(*row.curves, strict=True)]
                axes.plot(steps, scores, label=row.row.label, **looks[row.row.label])
        axes.axhline(self.part.target, color="0.7", linestyle=":")
        axes.set_xlabel(name)
        score_axis(axes, "validation", self.part.comparison.task.score)
        add_legend(axes)

    def facts(self) -> Iterator[Fact]:
        """Yield the mean steps and times to the target."""
        for row in self.rows:
            yield Fact(row.row.label, "", "steps to target", "count", row.mean_steps, seeds=len(row.steps))
            yield Fact(row.row.label, "", "time to target", "s", row.time, seeds=len(row.steps))
