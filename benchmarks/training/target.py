"""Time and steps that engines take to a validation score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

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
_CURVE = "{}, on the way"


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
        baseline: float | None = None
        for row, _, all_runs in self.comparison.runs(records, device):
            runs = [record for record in all_runs if not error_of(record)]
            who = {"task": self.comparison.task.name, "device": device, "row": row.name, "series": row.name}
            step = steps.get(row.name, Estimate()).value
            row_facts, time = self._row_facts(runs, step, who)
            known += row_facts
            baseline = time if row is self.comparison.rows[0] else baseline
            if time is not None and baseline is not None:
                known.append(fact(_TIME, times(self.comparison.rows[0].name), time / baseline, **who))
        return pl.concat([found, table(known)])

    def _row_facts(self, runs: list[Record], step: float, who: Mapping[str, Any]) -> tuple[list[Fact], float | None]:
        """Return a row's facts, and its time to the target if every run reached it."""
        task = self.comparison.task
        curves = {record["seeds"][0]: record["results"]["curve"] for record in runs}
        steps = {seed: taken for seed, curve in curves.items() if (taken := self._steps(curve)) is not None}
        known = [fact(_REACHED, "1", len(steps), note=f"{len(steps)} of {len(curves)}", **who)]
        known += [run_fact(_STEPS, "count", taken, seed, **who) for seed, taken in steps.items()]
        for evaluations in zip(*curves.values(), strict=True):
            at, mean = evaluations[0]["step"] + 1, fmean(evaluation["validation"] for evaluation in evaluations)
            place = {"setting": f"step {at}", "at": float(at)}
            known.append(fact(_CURVE.format(score_metric(task, "validation")), task.score.unit, mean, **who, **place))
        if not steps or len(steps) < len(curves):
            return known, None
        in_all = Estimate.of(list(steps.values()))
        time = in_all.value * step
        return [*known, fact(_STEPS, "count", in_all, **who), fact(_TIME, "s", time, **who)], time

    def _steps(self, curve: list[dict[str, Any]]) -> int | None:
        """Return the step of the first evaluation that reached the target."""
        goodness = self.comparison.task.score.goodness
        return next((e["step"] + 1 for e in curve if goodness(e["validation"]) >= goodness(self.target)), None)

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with the table of times to the target, and charts of the validation score."""
        task, baseline = self.comparison.task, self.comparison.rows[0].name
        curve = _CURVE.format(score_metric(task, "validation"))
        ratio = times(baseline)
        ours = pl.concat(
            [
                select(facts, metric=STEP, unit="s"),
                facts.filter(pl.col("metric").is_in([_STEPS, _TIME, _REACHED, curve])),
            ]
        )
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
                column("time (×)", _TIME, unit=ratio),
                column("reached", _REACHED, "{note}"),
            ],
            legend=(
                f"Steps: to the first of {task.evaluations} evaluations that reaches the target, mean over seeds. "
                f"Time: steps times the median time of a step{' in training' if self.course else ''}; "
                "×: as a multiple of the first row's. "
                "Reached: runs that reached the target; there is a mean only if all did."
            ),
            charts=self._charts(ours, curve),
            answer=self._answer(facts, level),
        )

    def _charts(self, ours: pl.DataFrame, curve: str) -> list[Chart]:
        """Return charts of the validation score, mean over seeds, against steps and against time."""
        task = self.comparison.task
        found = points(ours, "at", Figure(curve))
        seconds = {row: step.value for row, step in estimates(ours, metric=STEP).items()}
        timed = found.with_columns(
            x=pl.col("at") * pl.col("row").replace_strict(seconds, default=None, return_dtype=pl.Float64)
        )
        where, score = f"{task.name}, {ours['device'][0]}", task.score.name
        axis, target = (
            score_axis("validation", task.score),
            {f"the target, {self.target:g} {task.score.unit}": self.target},
        )
        return [
            Chart(f"{where}: {score} against time", timed.drop_nulls("x"), Axis("time (s)"), axis, True, target),
        ]

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
        return f"{words}: {Summary(task, self.comparison.learning_rates, facts).verdict(best)}."
