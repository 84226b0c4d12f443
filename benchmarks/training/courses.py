"""Time of whole training runs ("courses"), for engines whose cost depends on the weights, which change in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from gradfree import engine_figures
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.recurrent_layers import FORWARD_SWEEPS, SEQUENTIAL, SWEEPS
from gradfree.benchmarks.timing.side_by_side import RATIO, STEP, now, times
from gradfree.benchmarks.timing.timed import Timing, timed

_TOTAL, _LOSS, _APART = "time of all steps", "training loss at the end", "largest difference in training loss"
_CUT = "passes in segments"
_FIGURES = (FORWARD_SWEEPS, SWEEPS, SEQUENTIAL)
ROUNDS = 20


class CourseRun:
    """A training run whose steps are split evenly over the turns; each call takes the next turn's steps."""

    def __init__(self, case: Timing, row: Row):
        self.task, self.device = case.item, case.device
        self.recorded: dict[str, list[Tensor]] = {name: [] for name in (*_FIGURES, "loss")}
        task: Task = case.item
        self.model = task.create_model(case.seed).to(case.device)
        self.optimizer, self.schedule = task.create_optimizer(self.model)
        self.batches = task.batches(task.on(case.device, task.data().train), case.seed)
        engine = row.create_engine()
        self.handle = engine.attach(self.model, task.chains)
        # For engines that iterate only in the backward pass, figures would cost another sweep.
        self.with_figures = bool(engine.forwards)

    def __call__(self) -> float:
        """Take the steps of one turn; return the mean seconds of a step."""
        count = self.task.steps // ROUNDS
        start = now(self.device)
        for _ in range(count):
            self.step()
        return (now(self.device) - start) / count

    def step(self) -> None:
        """Take the next training step."""
        batch = next(self.batches)
        self.optimizer.zero_grad()
        compute = partial(self.task.loss_of, self.model, batch)
        loss = compute()
        with ExitStack() as stack:
            figures = stack.enter_context(engine_figures()) if self.with_figures else {}
            stack.enter_context(self.handle.lesson(batch.targets, compute))
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.recorded["loss"].append(loss.detach())
        for name in _FIGURES:
            self.recorded[name] += [chain[name] for chain in figures.values() if name in chain]


def _costs(case: Timing, run: CourseRun, turns: Sequence[float]) -> dict[str, Any]:
    """Return the time of all steps, the mean loss of each turn, and the means of the engine's figures."""
    recorded = {name: [float(value) for value in values] for name, values in run.recorded.items()}
    losses, count = recorded.pop("loss"), case.item.steps // ROUNDS
    means = [fmean(losses[start : start + count]) for start in range(0, len(losses), count)]
    figures = {name: fmean(values) for name, values in recorded.items() if values} | {_CUT: len(recorded[SWEEPS])}
    return {"total": count * sum(turns), "losses": means, "figures": figures}


def _facts_of(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield a row's total time, its losses and its sweeps."""
    if "total" not in cost:
        return
    exact = results["rows"][0]
    yield fact(_TOTAL, "s", cost["total"])
    yield fact(_TOTAL, times(results["baseline"]), cost["total"] / exact["total"])
    yield fact(_LOSS, "1", cost["losses"][-1])
    yield fact(_APART, "1", max(abs(a - b) for a, b in zip(cost["losses"], exact["losses"], strict=True)))
    for name, figure in cost["figures"].items():
        yield fact(name, "count", figure)


@timed(
    kind="course",
    subject="task",
    rounds=ROUNDS,
    repeats=1,
    runs=1,
    rebuild=True,
    title="whole training runs",
    legend="All steps: total time of the training, rows in turns; step: in the median turn. Loss: mean of the last "
    f"{ROUNDS}th of the training; difference: the largest one between the first row's mean loss and this row's, in any "
    f"{ROUNDS}th. Sweeps after the first run, and the share of sequential fallbacks: means over backward passes in "
    "segments.",
    names={"task": "setting", "engine": "row"},
    columns=[
        column("all steps (s)", _TOTAL, "{value:.1f}", "s"),
        column("all steps (×)", _TOTAL, "{value:.3f}", RATIO),
        column("step (ms)", STEP, "{value:.1f}", "s", factor=1e3),
        column("loss", _LOSS, "{value:.4f}"),
        column("difference", _APART, "{value:.1e}"),
        column("forward sweeps", FORWARD_SWEEPS),
        column("backward sweeps", SWEEPS),
        column("sequential", SEQUENTIAL),
        column("passes in segments", _CUT, "{value:.0f}"),
    ],
    costs=_costs,
    facts=_facts_of,
)
def courses(case: Timing) -> Mapping[str, Callable[[], CourseRun]]:
    """Return, by row, a function that builds the training run with the row's engine."""
    return {row.label: partial(CourseRun, case, row) for row in case.rows}
