"""Doing something after every step of whatever optimizer trains a chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the steps of optimizers that hold parameters of some modules, and calls back behind each.

    Works in a plain loop, under ``EngineOptimizer`` and in Lightning alike: torch tells of the steps of every
    ``torch.optim.Optimizer``. A copy of the model has no such counter: attach to the copy.

    Args:
        modules: whose parameters count.
        memory: keeps the count, as "steps".
        callback: called with the number of steps so far.
    """

    def __init__(self, modules: Iterable[nn.Module], memory: dict[str, Tensor], callback: Callable[[int], None]):
        self._modules = list(modules)
        self._memory, self._callback = memory, callback
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = {id(p) for module in self._modules for p in module.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            return
        # In checkpoints, so a tensor; always on the CPU, so reading it does not wait for a device.
        steps = int(self._memory.get("steps", 0)) + 1
        self._memory["steps"] = torch.tensor(steps)
        self._callback(steps)
