"""Doing something after every step of whatever optimizer trains a chain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

AfterStep = Callable[[Mapping[str, nn.Module], int], None]
"""Called with some modules by path, and how many steps an optimizer has taken with parameters of theirs."""

_ended: list[RemovableHandle] = []
"""Of counters whose modules are gone: noticed in a step, while torch goes through its hooks and none may be removed."""


class OptimizerSteps:
    """Counts the steps of optimizers that hold parameters of some modules, and calls back behind each.

    Works in a plain loop, under ``EngineOptimizer`` and in Lightning alike: torch tells of the steps of every
    ``torch.optim.Optimizer``. A copy of the model has no such counter: attach to the copy. Torch holds the counter for
    ever, the counter holds no module: it ends with the first of them.

    Args:
        blocks: the modules whose parameters count, by path.
        memory: keeps the count, as "steps".
        callback: called with the blocks and the number of steps so far; should hold none of them either.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        memory: dict[str, Tensor],
        callback: AfterStep,
    ):
        self._blocks = {path: weakref.ref(block) for path, block in blocks.items()}
        self._modules = [weakref.ref(module) for block in blocks.values() for module in block.modules()]
        self._memory, self._callback = memory, callback
        while _ended:
            _ended.pop().remove()
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        blocks = {path: block for path, ref in self._blocks.items() if (block := ref()) is not None}
        if len(blocks) < len(self._blocks):
            self._blocks, self._modules, self._memory, self._callback = {}, [], {}, _nothing
            _ended.append(self._handle)
            return
        # Other models' optimizers pass here too: walking through all modules would cost them 0.1 ms a step.
        modules = [module for ref in self._modules if (module := ref()) is not None]
        own = {id(p) for module in modules for p in module._parameters.values()}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]
        if not mine:
            return
        # In checkpoints, so a tensor; always on the CPU, so reading it does not wait for a device.
        steps = int(self._memory.get("steps", 0)) + 1
        self._memory["steps"] = torch.tensor(steps, device="cpu")
        # In manual optimization in Lightning the step is taken under autocast.
        with torch.autocast(mine[0].device.type, enabled=False):
            self._callback(blocks, steps)


class Boundaries:
    """Calls back between two steps of training: behind each step of the optimizer that trains some modules.

    Of several optimizers that hold parameters of theirs, those of one step taken together, the first that steps counts.
    Torch holds this for ever, this holds neither the modules nor whom it calls: it ends with either.

    Args:
        modules: whose optimizer counts.
        callback: a bound method.
    """

    def __init__(self, modules: Iterable[nn.Module], callback: Callable[[], None]):
        self._modules = [weakref.ref(module) for module in modules]
        self._callback: Any = weakref.WeakMethod(callback)
        self._optimizer: Any = None
        while _ended:
            _ended.pop().remove()
        self._handle: RemovableHandle | None = register_optimizer_step_post_hook(self._after_step)

    @property
    def watched(self) -> bool:
        """Whether it has not been removed."""
        return self._handle is not None

    def remove(self) -> None:
        """Call no more."""
        if self._handle is not None:
            # Torch may be going through its hooks.
            _ended.append(self._handle)
        self._handle, self._callback = None, _nothing

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        callback = self._callback()
        if callback is None:
            self.remove()
        elif self._counts(optimizer):
            callback()

    def _counts(self, optimizer: Optimizer) -> bool:
        """Return whether it is the one that counts."""
        followed = self._optimizer and self._optimizer()
        if followed is not None:
            return followed is optimizer
        modules = [module for ref in self._modules if (module := ref()) is not None]
        own = {id(p) for module in modules for p in module.parameters()}
        if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            return False
        self._optimizer = weakref.ref(optimizer)
        return True


def _nothing(*args: Any) -> None:
    pass
