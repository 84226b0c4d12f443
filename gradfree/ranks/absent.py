"""What stands in for the parts of a model that other ranks hold: NaN for weights, a return by the way for blocks.

A rank runs the whole forward of the model, so that masks and the like are there that blocks are given. What it computes
before its own blocks is of weights that are not there, and is not used; that would be seen. Behind its own blocks it
leaves the model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Left(BaseException):
    """Takes a rank out of the model's forward behind its last block. No error: nobody is to handle it.

    Args:
        state: what the next rank's first block was given.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state = state


def nowhere(tensor: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return NaN, like ``tensor``, in no memory; a leaf of autograd's graph, by which its use is found out."""
    number = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    empty = tensor.detach().new_full((), number).expand(tensor.shape if shape is None else shape)
    return empty.requires_grad_(tensor.requires_grad)


def vacate(model: nn.Module, held: Collection[int], elsewhere: Iterable[nn.Module]) -> dict[int, str]:
    """Take all parameters off a model but those that are held, and the buffers off some modules.

    Args:
        model: the model.
        held: the ids of the parameters that stay.
        elsewhere: the modules that never run here.

    Returns:
        The names of what stands in their places, by id.
    """
    gone: dict[int, str] = {}
    stands: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in held:
                continue
            # A plain attribute: nothing that asks for the module's parameters or state finds it.
            stand = stands.setdefault(id(parameter), nowhere(parameter))
            del module._parameters[name]
            object.__setattr__(module, name, stand)
            gone[id(stand)] = f"{path}.{name}" if path else name
    for module in elsewhere:
        for name in module._buffers:
            module._buffers[name] = None
    return gone


def stand_in(block: nn.Module, run: Callable[..., Any]) -> None:
    """Let ``run`` be what the block does."""
    block.forward = run
