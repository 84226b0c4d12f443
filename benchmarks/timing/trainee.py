"""A model in training, for its steps to be measured."""

from __future__ import annotations

import torch
from torch.utils.benchmark import Timer

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.memory import peak_memory

_WARM_UP = 3


class Trainee:
    """A model in training with one row's engine, on one batch over and over."""

    def __init__(self, task: Task, row: Row, device: str, seed: int):
        self.task = task
        self.device = device
        self.model = task.create_model(seed).to(device)
        self.optimizer, _ = task.create_optimizer(self.model)
        self.batch = task.on(device, next(task.batches(task.data().train, seed)))
        task.attach(row.create_engine(), self.model)

    def step(self) -> None:
        """Take a training step."""
        self.optimizer.zero_grad()
        self.task.loss(self.model(self.batch.inputs), self.batch.targets).backward()
        self.optimizer.step()

    def step_time(self) -> float:
        """Return how many seconds a step takes, a median, once warm."""
        timer = Timer("step()", globals={"step": self.step}, num_threads=torch.get_num_threads())
        timer.timeit(_WARM_UP)
        return timer.blocked_autorange(min_run_time=0.5).median

    def peak_memory(self) -> int:
        """Return the peak in bytes of one step that starts without gradients."""
        self.optimizer.zero_grad()
        return peak_memory(self.step, self.device)
