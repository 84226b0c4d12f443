"""Copies of a block with its structure, but without its numbers and hooks, and calls of them with other numbers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

MODULE_ATTRIBUTES = {*vars(nn.Module())}
"""The attributes that every module has."""

_HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "hook" in name]


def held_by(own: dict[str, Any]) -> Iterator[Any]:
    """Yield what a module with the attributes ``own`` holds, without what every module has."""
    return (value for name, value in own.items() if name not in MODULE_ATTRIBUTES)


def structure_of(block: nn.Module, *, own_settings: bool = False) -> nn.Module:
    """Return a copy of ``block`` on the meta device, without hooks.

    Args:
        block: any module.
        own_settings: whether to copy objects that are neither tensors nor modules, too. Otherwise the copy reads those
            of ``block``, which may change later.
    """
    known: dict[int, Any] = {}
    if not own_settings:
        held = (value for module in block.modules() for value in held_by(vars(module)))
        known.update((id(value), value) for value in held if not isinstance(value, Tensor | nn.Module))
    for tensor in tensors_of(block).values():
        like = torch.empty_like(tensor, device="meta")
        known[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
    for module in block.modules():
        known.update((id(vars(module)[name]), OrderedDict()) for name in _HOOKS if name in vars(module))
    return copy.deepcopy(block, known)


def tensors_of(block: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``block``, module by module; a shared one appears under each name."""
    return {
        f"{path}.{name}" if path else name: tensor
        for path, module in block.named_modules(remove_duplicate=False)
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    }


def call(structure: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of ``structure`` for ``x`` with these parameters and buffers, with a graph."""
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        out: Tensor = functional_call(structure, dict(tensors), (x,))
        return out
