"""A task for Lightning's Trainer."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.tasks.task import Task


class TaskModule(LightningModule):
    """A task's model, loss and optimizer."""

    def __init__(self, task: Task, seed: int):
        super().__init__()
        self.task, self.model = task, task.create_model(seed)

    def training_step(self, batch: Split, index: int) -> Tensor:
        """Return the loss."""
        return self.task.loss(self.model(batch.inputs), batch.targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, at one rate."""
        optimizer, _ = self.task.create_optimizer(self.model)
        return optimizer
