"""What a step of Lightning's Trainer costs with an engine as its strategy, and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import estimates
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import STEP, Timing, Timings, Turn, now, times

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_AUTO = "auto"
_WARM_UP = 5
_STEPS = 20
_MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class StrategyTiming(Timing[Callable[[], float]]):
    """Time of a step under ``Trainer(strategy="auto")`` and with each row's engine: one short fit a turn."""

    kind: ClassVar[str] = "strategy"
    rounds: ClassVar[int] = 15
    task: Task
    sides = "all strategies"

    def steps(self) -> Mapping[str, Callable[[], Callable[[], float]]]:
        """Return what builds a module that is fitted with each strategy."""
        return {_AUTO: partial(self._fit, None), **{row.label: partial(self._fit, row) for row in self.rows}}

    def turn(self, step: Callable[[], float]) -> Turn:
        """Fit once; return the mean of the steps behind the warm-up."""
        return (step(),)

    @cached_property
    def _batches(self) -> list[Split]:
        train = Split(*(x.to(self.device) for x in self.task.data().train))
        return list(islice(self.task.batches(train, self.seed), _WARM_UP + _STEPS))

    def _fit(self, row: Row | None) -> Callable[[], float]:
        """Return what fits the task's model for some steps with a new strategy, and returns the mean time of one."""
        from gradfree.lightning import EngineStrategy

        module = _module(self.task, self.seed)

        def fit() -> float:
            strategy = EngineStrategy(row.create_engine()) if row else _AUTO
            return _step_time(module, strategy, self._batches, self.device)

        return fit


def _module(task: Task, seed: int) -> LightningModule:
    """Return a task's model with its loss and optimizer, at one rate."""
    from lightning.pytorch import LightningModule

    class TaskModule(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.create_model(seed)

        def training_step(self, batch: Split, index: int) -> Tensor:
            return task.loss(self.model(batch.inputs), batch.targets)

        def configure_optimizers(self) -> Optimizer:
            return task.create_optimizer(self.model)[0]

    return TaskModule()


def _step_time(module: LightningModule, strategy: Any, batches: Sequence[Split], device: str) -> float:
    """Return the mean time of a step: from the first behind the warm-up to the end of the last."""
    from lightning.pytorch.callbacks import LambdaCallback

    from gradfree.testing.runs.lightning import quiet, trainer_of

    moments = []

    def begin(trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        if index == _WARM_UP:
            moments.append(now(module.device))

    def end(trainer: Trainer, module: LightningModule) -> None:
        moments.append(now(module.device))

    with quiet():
        trainer = trainer_of(strategy, device, callbacks=[LambdaCallback(on_train_batch_start=begin, on_train_end=end)])
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    started, ended = moments
    return (ended - started) / _STEPS


@dataclass(frozen=True)
class StrategyTimings(Timings[Task]):
    """Engines as strategies, on one task."""

    timed = StrategyTiming

    def where(self, case: Case) -> dict[str, Any]:
        """Return the task."""
        return {"task": case.topic}

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of the times of a step, a row a strategy."""
        (task,) = self.subjects
        device = facts["device"][0]
        ratio = Figure(STEP, "{value:.3f} [{low:.3f}, {high:.3f}]", times(_AUTO))
        ratios = estimates(facts, metric=STEP, unit=times(_AUTO))
        _, *engines = ratios
        near = ", ".join(label for label in engines if abs(ratios[label].value - 1) <= _MARGIN)
        close = f"Within {100 * _MARGIN:.0f} % of Lightning's own step: {near}."
        return Section(
            title=f"Trainer(strategy=...): {task.name}, {task.model}, device: {device}",
            facts=facts,
            names={"strategy": "row"},
            columns=[column("step (ms)", STEP, unit="s", factor=1e3), Column("step (×)", (ratio,))],
            setup=f"Trained: {task.architecture}, by {task.optimizer}; {task.batch_size} examples a batch.",
            legend="One step of Lightning's Trainer, from batch to batch; medians of "
            f"{StrategyTiming.rounds} interleaved fits of {_STEPS} steps, and in brackets quartiles. ×: as a multiple "
            'of strategy="auto", Lightning\'s own, in the same round.',
            verdicts=["the baseline", *(verdict.speed(ratios[label], _AUTO) for label in engines)],
            remarks=[*([close] if near else []), *self.failures(facts)],
            charts=[
                Chart(
                    f"Trainer(strategy=...), {task.name}, {device}",
                    points(facts, "row", ratio),
                    Axis("strategy", "names"),
                    Axis(f'time of a step, as a multiple of "{_AUTO}"\'s (×)'),
                    rules={"Lightning's own": 1.0},
                )
            ],
        )
