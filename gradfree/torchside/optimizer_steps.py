"""Callbacks after every step of the optimizers that train a chain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

AfterStep = Callable[[Mapping[str, nn.Module], int], None]
"""Called with modules by path, and the number of steps that an optimizer has taken with their parameters."""


class StepCounter:
    """Counts the steps of optimizers that have parameters of some modules, and calls a function after each.

    Works in a plain loop, under ``EngineOptimizer`` and in Lightning, by torch's global hook for optimizer steps. A
    copy of the model has no counter: detach, copy, and attach to both. Torch keeps the counter alive, so the counter
    only has weak references to modules; it stops when all of them are gone.

    Args:
        blocks: the modules whose parameters count, by path.
        callback: called with the blocks and the number of steps so far; should not keep modules alive either.
        memory: stores the count as "steps".
        first_only: whether to count only one of several optimizers, the one that steps first.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        callback: AfterStep,
        memory: dict[str, Tensor] | None = None,
        first_only: bool = False,
    ):
        self._blocks = {path: weakref.ref(block) for path, block in blocks.items()}
        self._modules = [weakref.ref(module) for block in blocks.values() for module in block.modules()]
        self._callback: AfterStep | None = callback
        self._memory = {} if memory is None else memory
        self._first_only = first_only
        self._first: weakref.ref[Optimizer] | None = None
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop counting."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        blocks = {path: block for path, ref in self._blocks.items() if (block := ref()) is not None}
        if self._callback is None or not blocks:
            self._blocks, self._modules, self._memory, self._callback = {}, [], {}, None
            return
        # This also runs for optimizers of other models: walking through all modules would cost them 0.1 ms a step.
        modules = [module for ref in self._modules if (module := ref()) is not None]
        own = {id(p) for module in modules for p in module._parameters.values()}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        first = self._first and self._first()
        if not mine or (self._first_only and first not in (None, optimizer)):
            return
        self._first = weakref.ref(optimizer)
        # A tensor, because checkpoints contain it; on the CPU, where reading it does not wait for a device.
        steps = int(self._memory.get("steps", 0)) + 1
        self._memory["steps"] = torch.tensor(steps, device="cpu")
        # With manual optimization in Lightning, autocast is on here.
        with torch.autocast(mine[0].device.type, enabled=False):
            self._callback(blocks, steps)
