"""Time and steps that engines take to a validation score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.chart import Axis, Chart, points, score_axis
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.experiment import Experiment
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimates, fact, run_fact, select, table
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import STEP, times
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.outcomes import score_metric
from gradfree.benchmarks.training.summary import Summary

_STEPS, _TIME, _REACHED = "steps to target", "time to target", "runs at the target"


@dataclass(frozen=True)
class TimeToTarget(Experiment):
    """The steps that a comparison's training runs take to reach a validation score, and the time of these steps.

    It adds no cases. The time is the number of steps times the time of a step, which is measured separately: so
    evaluations, and training runs in parallel, do not count.

    Attributes:
        comparison: the comparison, with a task that is evaluated during training.
        target: the validation score.
        course: timings of whole training runs of the task. They replace the time of a step of the untrained model,
            as some engines slow down when the weights change.
    """

    comparison: Comparison
    target: float
    course: Timings | None = None

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return the comparison's facts, and each row's steps and time to the target; empty if no step is timed."""
        found = self.comparison.facts(records, device)
        if self.course:
            taken = self.course.facts(records, device).filter(pl.col("metric") == STEP)
            taken = taken.with_columns(task=pl.lit(self.comparison.task.name), setting=pl.lit(None, pl.String))
            found = pl.concat([found.filter(pl.col("metric") != STEP), taken])
        steps = estimates(found, metric=STEP, unit="s")
        if not steps:
            return table([])
        known: list[Fact] = []
        for row, _, runs in self.comparison.runs(records, device):
            known += self._row_facts(row, runs, steps.get(row.name, Estimate()).value, device)
        baseline, timed = self.comparison.rows[0].name, [one for one in known if one["metric"] == _TIME]
        exact = next((one["value"] for one in timed if one["row"] == baseline), None)
        ratios = [{**one, "unit": times(baseline), "value": one["value"] / exact} for one in timed if exact]
        return pl.concat([found, table([*known, *ratios])])

    def _row_facts(self, row: Row, runs: list[Record], step: float, device: str) -> Iterator[Fact]:
        """Yield a row's steps to the target, its mean score on the way and, if every run reached it, its time."""
        task = self.comparison.task
        who: dict[str, Any] = {"task": task.name, "device": device, "row": row.name, "series": row.name}
        curves = {record["seeds"][0]: record["results"]["curve"] for record in runs if not error_of(record)}
        steps = {seed: taken for seed, curve in curves.items() if (taken := self._steps(curve)) is not None}
        yield fact(_REACHED, "1", len(steps), note=f"{len(steps)} of {len(curves)}", **who)
        for seed, taken in steps.items():
            yield run_fact(_STEPS, "count", taken, seed, **who)
        for evaluations in zip(*curves.values(), strict=True):
            at, mean = evaluations[0]["step"] + 1, fmean(evaluation["validation"] for evaluation in evaluations)
            place = {"setting": f"step {at}", "at": float(at)}
            yield fact(self._curve, task.score.unit, mean, **who, **place)
        if steps and len(steps) == len(curves):
            in_all = Estimate.of(list(steps.values()))
            yield fact(_STEPS, "count", in_all, **who)
            yield fact(_TIME, "s", in_all.value * step, **who)

    @property
    def _curve(self) -> str:
        """The metric of the validation score during training."""
        return f"{score_metric(self.comparison.task, 'validation')}, on the way"

    def _steps(self, curve: list[dict[str, Any]]) -> int | None:
        """Return the step of the first evaluation that reached the target."""
        goodness = self.comparison.task.score.goodness
        return next((e["step"] + 1 for e in curve if goodness(e["validation"]) >= goodness(self.target)), None)

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with the table of times to the target, and the chart of the validation score."""
        task, ratio = self.comparison.task, times(self.comparison.rows[0].name)
        taken = facts.filter(pl.col("metric").is_in([_STEPS, _TIME, _REACHED, self._curve]))
        ours = pl.concat([select(facts, metric=STEP, unit="s"), taken])
        device, reached = ours["device"][0], select(ours, metric=_REACHED)["note"]
        seeds = max(int(note.rpartition(" ")[2]) for note in reached)
        level = f"validation {task.score.name} {self.target:g} {task.score.unit}"
        return Section(
            title=f"{task.name}: time to {level}, seeds: {seeds}, device: {device}",
            facts=ours,
            columns=[
                column("step (ms)", STEP, unit="s", factor=1e3),
                column("steps to target", _STEPS, "{value:.0f}"),
                column("time to target (s)", _TIME, unit="s"),
                column("time to target (×)", _TIME, unit=ratio),
                column("reached", _REACHED, "{note}"),
            ],
            legend=(
                f"Steps: to the first of {task.evaluations} evaluations that reaches the target, mean over seeds. "
                f"Time: steps times the median time of a step{' in training' if self.course else ''}; "
                "×: as a multiple of the first row's. "
                "Reached: runs that reached the target; there is a mean only if all did."
            ),
            charts=[self._chart(ours)],
            answer=self._answer(facts, level),
        )

    def _chart(self, ours: pl.DataFrame) -> Chart:
        """Return the chart of the validation score, mean over seeds, against time."""
        task = self.comparison.task
        seconds = {row: step.value for row, step in estimates(ours, metric=STEP).items()}
        found = points(ours, "at", Figure(self._curve)).with_columns(
            x=pl.col("at") * pl.col("row").replace_strict(seconds, default=None, return_dtype=pl.Float64)
        )
        return Chart(
            f"{task.name}, {ours['device'][0]}: {task.score.name} against time",
            found.drop_nulls("x"),
            Axis("time (s)"),
            score_axis("validation", task.score, "linear" if task.score.higher_is_better else "log"),
            lines=True,
            rules={f"the target, {self.target:g} {task.score.unit}": self.target},
        )

    def _answer(self, facts: pl.DataFrame, level: str) -> str:
        """Return which row reaches the target soonest, and its speed, memory and score."""
        task, baseline = self.comparison.task, self.comparison.rows[0].name
        found = estimates(facts, metric=_TIME, unit="s")
        if not found:
            return f"{task.name}: no row reached {level} with every seed."
        best = min(found, key=lambda row: found[row].value)
        words = f"{task.name}: {best} reached {level} soonest, after {found[best].value:.2f} s"
        if best == baseline:
            return f"{words}."
        if baseline in found:
            words += f", {found[baseline].value / found[best].value:.1f}× sooner than {baseline}"
        step = f"a step {'in training' if self.course else 'on one batch'} is"
        return f"{words}: {step} {Summary(task, self.comparison.learning_rates, facts).verdict(best)}."
