"""What replaces the parts of a model that other ranks hold: NaN for weights, an early exit for blocks.

A rank runs the whole forward of the model, so that masks and the like are there that blocks are given. What it computes
before its own blocks is of weights that are not there, and is not used; that would be seen. Behind its own blocks it
leaves the model's forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gradfree.torchside.graph import walk


class EarlyExit(BaseException):
    """Takes a rank out of the model's forward behind its last block. No error: it must not be handled.

    Args:
        state: what the next rank's first block was given.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state = state


def placeholder(tensor: Tensor) -> Tensor:
    """Return NaN, like ``tensor``, in no memory; a leaf of autograd's graph, by which its use is found."""
    number = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.detach().new_full((), number).expand(tensor.shape).requires_grad_(tensor.requires_grad)


def vacate(model: nn.Module, held: Collection[int], elsewhere: Iterable[nn.Module]) -> dict[int, str]:
    """Take all parameters off a model but those that are held, and the buffers off some modules.

    Args:
        model: the model.
        held: the ids of the parameters that stay.
        elsewhere: the modules that never run here.

    Returns:
        The names of the parameters taken off, by the ids of their placeholders.
    """
    names: dict[int, str] = {}
    placeholders: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in held:
                continue
            own = placeholders.setdefault(id(parameter), placeholder(parameter))
            # A plain attribute: nothing that asks for the module's parameters or state finds it.
            del module._parameters[name]
            setattr(module, name, own)
            names[id(own)] = f"{path}.{name}" if path else name
    for module in elsewhere:
        for name in module._buffers:
            module._buffers[name] = None
    return names


def absent_weight(tensors: Iterable[Tensor], names: Mapping[int, str]) -> str | None:
    """Return the name of a weight that ``tensors`` depend on and that is not here, by what :func:`vacate` returned."""
    leaves = walk(tensor for tensor in tensors if tensor.requires_grad).leaves
    return next((names[id(leaf)] for leaf in leaves if id(leaf) in names), None)
