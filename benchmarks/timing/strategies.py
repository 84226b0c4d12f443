"""What a step of Lightning's Trainer costs with an engine as its strategy, and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import RATIO, STEP, now
from gradfree.benchmarks.timing.timed import Timing, timed

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_AUTO = "auto"
_WARM_UP = 5
_STEPS = 20


@timed(
    kind="strategy",
    subject="task",
    rounds=15,
    runs=1,
    title="Trainer(strategy=...)",
    legend=f"One step of Lightning's Trainer, from batch to batch, mean of {_STEPS} steps of a fit; in brackets "
    f'quartiles. The baseline is strategy="{_AUTO}", Lightning\'s own.',
    names={"strategy": "row"},
    columns=[
        column("step (ms)", STEP, unit="s", factor=1e3),
        Column("step (×)", (Figure(STEP, "{value:.3f} [{low:.3f}, {high:.3f}]", RATIO),)),
    ],
    place=lambda task: {"task": str(task)},
    sides=lambda task: "all strategies",
)
def strategies(case: Timing) -> Mapping[str, Callable[[], Callable[[], float]]]:
    """Return what builds a module that is fitted with each strategy."""
    return {_AUTO: partial(_fits, case, None), **{row.label: partial(_fits, case, row) for row in case.rows}}


def _fits(case: Timing, row: Row | None) -> Callable[[], float]:
    """Return what fits the task's model for some steps with a new strategy, and returns the mean time of one."""
    from gradfree.lightning import EngineStrategy

    task: Task = case.item
    module = _module(task, case.seed)
    train = Split(*(x.to(case.device) for x in task.data().train))
    batches = list(islice(task.batches(train, case.seed), _WARM_UP + _STEPS))

    def fit() -> float:
        strategy = EngineStrategy(row.create_engine()) if row else _AUTO
        return _step_time(module, strategy, batches, case.device)

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
