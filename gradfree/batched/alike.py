"""Which modules are alike, so that one of them can stand for all in a batched call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.torchside.sharding import own_class

_OWN = {*vars(nn.Module()), "forward", "_replicate_for_data_parallel", "__reduce_ex__", "__deepcopy__"}
"""The attributes that every module has, or that engines give it."""

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)

Slot = tuple[dict[str, Any], str]
"""Where a parameter or buffer is: a module's dictionary, and the key there."""


def likeness(module: nn.Module) -> Hashable:
    """Return what two modules have in common if either may stand for the other, given its parameters and buffers.

    That is their structure: classes, shapes, what is trained, modes, and all plain attributes. Any other attribute,
    such as a tensor or a function, must be the same object.
    """
    return tuple(
        (name, own_class(inner), inner.training, _attributes(inner), _tensors(inner))
        for name, inner in module.named_modules(remove_duplicate=False)
    )


class Held:
    """What the user's own classes among ``modules`` hold beside tensors, for changes between passes to be seen.

    torch's layers are left out: all of a chain's would take longer to look at than small blocks take to run.
    """

    def __init__(self, modules: Sequence[nn.Module]):
        own = [m for m in modules if not type(m).__module__.startswith("torch.nn.")]
        self._own = [(vars(m), tuple(name for name in vars(m) if name not in _OWN)) for m in own]
        self._children = [m._modules for m in modules if m._modules]

    @property
    def attributes(self) -> Hashable:
        """Equal for two passes only if no attribute has changed between them."""
        values = tuple([tuple([_value(held.get(name)) for name in names]) for held, names in self._own])
        return values, tuple([len(held) for held, _ in self._own])

    @property
    def layers(self) -> list[Any]:
        """Equal for two passes only if no layer has been exchanged between them."""
        return list(chain.from_iterable(map(dict.values, self._children)))


def slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield where the parameters and buffers of ``module`` are, each by its name."""
    for path, inner in module.named_modules():
        for own in (inner._parameters, inner._buffers):
            for key, tensor in own.items():
                if tensor is not None:
                    yield f"{path}.{key}" if path else key, (own, key)


def _attributes(module: nn.Module) -> Hashable:
    return tuple((name, _value(value)) for name, value in vars(module).items() if name not in _OWN)


def _value(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, but not alike.
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), *map(_value, value)
    if isinstance(value, dict):
        return dict, *((_value(k), _value(v)) for k, v in value.items())
    return id(value)


def _tensors(module: nn.Module) -> Hashable:
    return tuple(
        (name, None if tensor is None else _layout(tensor))
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
    )


def _layout(tensor: Tensor) -> Hashable:
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
