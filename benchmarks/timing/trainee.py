"""A model in training, for its steps to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.profiles import peak_memory

_WARM_UP = 3


@dataclass(frozen=True)
class Trainee:
    """A model in training on one batch over and over."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, task: Task, row: Row, device: str, seed: int) -> Trainee:
        """Return ``task``'s model with ``row``'s engine, and its first batch."""
        model = task.create_model(seed).to(device)
        optimizer, _ = task.create_optimizer(model)
        batch = task.on(device, next(task.batches(task.data().train, seed)))
        task.attach(row.create_engine(), model)
        return cls(model, optimizer, task.loss, batch.inputs, batch.targets)

    def passes(self) -> None:
        """Run forward and backward pass."""
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.targets).backward()

    def __call__(self) -> None:
        """Take a training step."""
        self.passes()
        self.optimizer.step()

    def step_time(self) -> float:
        """Return how many seconds a step takes, a median, once warm."""
        timer = Timer("step()", globals={"step": self}, num_threads=torch.get_num_threads())
        timer.timeit(_WARM_UP)
        return timer.blocked_autorange(min_run_time=0.5).median

    def peak_memory(self) -> int:
        """Return the peak in bytes of one step that starts without gradients."""
        self.optimizer.zero_grad()
        return peak_memory(self, self.inputs.device)
