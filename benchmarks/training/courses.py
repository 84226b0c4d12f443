"""What whole training runs take: engines whose cost depends on the weights are timed while these change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, ClassVar

from torch import Tensor

from gradfree import engine_figures
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.recurrent_layers import FORWARD_SWEEPS, SEQUENTIAL, SWEEPS
from gradfree.benchmarks.timing.side_by_side import STEP, Errors, Timing, Timings, Turn, now, times

_TOTAL, _LOSS, _APART = "time of all steps", "training loss at the end", "largest difference in training loss"
_CUT = "passes in segments"
_FIGURES = (FORWARD_SWEEPS, SWEEPS, SEQUENTIAL)


class CourseRun:
    """A model in training from its first step on, a batch a call."""

    def __init__(self, case: Course, row: Row):
        self.task, self.told = case.task, {name: list[Tensor]() for name in (*_FIGURES, "loss")}
        self.model = self.task.create_model(case.seed).to(case.device)
        self.optimizer, self.schedule = self.task.create_optimizer(self.model)
        train = self.task.on(case.device, self.task.data().train)
        self.batches = self.task.batches(train, case.seed)
        engine = row.create_engine()
        self.task.attach(engine, self.model)
        # Of engines that do not iterate in both passes figures cost a sweep.
        self.asked = bool(engine.forwards)

    def __call__(self) -> None:
        """Take the next training step."""
        batch = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(batch.inputs), batch.targets)
        with ExitStack() as stack:
            figures = stack.enter_context(engine_figures()) if self.asked else {}
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.told["loss"].append(loss.detach())
        for name in _FIGURES:
            self.told[name] += [chain[name] for chain in figures.values() if name in chain]


@dataclass(frozen=True, kw_only=True)
class Course(Timing[CourseRun]):
    """Time of a whole training run of every row, some steps of each in turns."""

    kind: ClassVar[str] = "course"
    rounds: ClassVar[int] = 20
    task: Task

    def steps(self) -> Mapping[str, Callable[[], CourseRun]]:
        """Return what builds a model in training with each row's engine."""
        return {row.label: partial(CourseRun, self, row) for row in self.rows}

    def _started(self) -> tuple[dict[str, CourseRun], Errors]:
        """Return the runs from their first step, on a warm machine."""
        warm, errors = super()._started()
        return {label: build() for label, build in self.steps().items() if label in warm}, errors

    def turn(self, step: CourseRun) -> Turn:
        """Take a turn's share of the steps; return the mean."""
        count = self.task.steps // self.rounds
        start = now(self.device)
        for _ in range(count):
            step()
        return ((now(self.device) - start) / count,)

    def costs(self, step: CourseRun, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the time of all steps, the mean losses of each turn, and the means of what the engine told."""
        told = {name: [float(value) for value in values] for name, values in step.told.items()}
        losses, count = told.pop("loss"), self.task.steps // self.rounds
        means = [fmean(losses[start : start + count]) for start in range(0, len(losses), count)]
        figures = {name: fmean(values) for name, values in told.items() if values} | {_CUT: len(told[SWEEPS])}
        return {"total": count * sum(map(sum, turns)), "losses": means, "figures": figures}


@dataclass(frozen=True)
class Courses(Timings[Task]):
    """Whole training runs."""

    timed = Course

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes in all, where it gets, and how its chains were solved."""
        yield from super().cost(cost, results)
        if "total" not in cost:
            return
        exact = results["rows"][0]
        yield fact(_TOTAL, "s", cost["total"])
        yield fact(_TOTAL, times(exact["label"]), cost["total"] / exact["total"])
        yield fact(_LOSS, "1", cost["losses"][-1])
        apart = (abs(loss - other) for loss, other in zip(cost["losses"], exact["losses"], strict=True))
        yield fact(_APART, "1", max(apart))
        for name, figure in cost["figures"].items():
            yield fact(name, "count", figure)

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of times, losses and sweeps, a row an engine and task."""
        device, baseline = facts["device"][0], self.rows[0].label
        what = (f"{t.name}: {t.model}, {t.budget}, {t.batch_size} a batch" for t in self.subjects)
        return Section(
            title=f"whole training runs, device: {device}, threads: {self.threads}",
            facts=facts,
            names={"task": "setting", "engine": "row"},
            columns=[
                column("all steps (s)", _TOTAL, "{value:.1f}", "s"),
                column("all steps (×)", _TOTAL, "{value:.3f}", times(baseline)),
                column("step (ms)", STEP, "{value:.1f}", "s", factor=1e3),
                column("loss", _LOSS, "{value:.4f}"),
                column("apart", _APART, "{value:.1e}"),
                column("forward sweeps", FORWARD_SWEEPS),
                column("backward sweeps", SWEEPS),
                column("sequential", SEQUENTIAL),
                column("of passes", _CUT, "{value:.0f}"),
            ],
            legend=f"{'; '.join(what)}. All steps: from the first to the last, rows in turns; ×: as a multiple of the "
            f"first row's; step: the median turn's. Loss: mean of the last {Course.rounds}th of the training; apart: "
            f"the largest difference of any {Course.rounds}th's mean to the first row's. Sweeps, behind the first run, "
            "and the share that went on sequentially: means of the backward passes that were cut, and how many were.",
            remarks=list(self.failures(facts)),
        )
