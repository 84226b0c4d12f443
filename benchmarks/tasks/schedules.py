"""Tasks with the optimizers and learning rate schedules of papers."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from gradfree.benchmarks.tasks.task import SGDTask, Task

_WARMUP = 0.1
_FLOOR = 0.1


@dataclass(frozen=True, kw_only=True)
class AdamTask(Task):
    """A task with Adam; the learning rate is warmed up for a tenth of the steps, then a cosine down to a tenth.

    Attributes:
        weight_decay: weight decay added to the gradients, as in Adam and unlike AdamW.
        max_norm: always ``None``; a part of the ids of records since gradients could be clipped.
    """

    weight_decay: float = 0.0
    max_norm: None = None
    course: ClassVar[str] = "warmed up for a tenth of the steps, then a cosine down to a tenth"

    def create_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return the optimizer and its learning rate schedule."""
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        return optimizer, self.schedule(optimizer)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the learning rate schedule of ``optimizer``."""
        warmup = max(1, round(_WARMUP * self.steps))
        rest = max(1, self.steps - warmup)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return _FLOOR + (1 - _FLOOR) * (1 + cos(pi * min(1.0, (step - warmup) / rest))) / 2

        return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class ConstantSGDTask(SGDTask):
    """A task with SGD at a constant learning rate."""

    course: ClassVar[str] = "throughout"

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the learning rate schedule of ``optimizer``."""
        return LambdaLR(optimizer, lambda _: 1.0)
