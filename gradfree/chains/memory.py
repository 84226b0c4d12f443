"""Tensors that a chain keeps from pass to pass, and averages of its running means over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import nan, prod

import torch
from torch import Tensor, distributed

_KEYS = {
    "feedback": r".* \(\d+(, \d+)*,?\)",
    "means": r"mean of .*",
    "steps": r"steps",
    "retraction": r"drifts|drift probe of .*",
    "foton": r"F to .*",
}
"""Patterns of tensor names of the oldest owners, in checkpoints; all other owners' tensors are named "owner: name"."""


class Memory:
    """Tensors that a chain keeps from pass to pass, in a namespace for each owner; saved in checkpoints."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, Tensor]] = {}

    def of(self, owner: str) -> dict[str, Tensor]:
        """Return the mutable dict of ``owner``'s tensors by name; always the same object."""
        return self._owners.setdefault(owner, {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by their names in checkpoints."""
        return {_key(owner, name): kept for owner, own in self._owners.items() for name, kept in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all tensors by those of ``state``, from :meth:`state_dict`."""
        for own in self._owners.values():
            own.clear()
        for key, kept in state.items():
            owner, name = _owned(key)
            self.of(owner)[name] = kept


def _key(owner: str, name: str) -> str:
    return name if not owner or owner in _KEYS else f"{owner}: {name}"


def _owned(key: str) -> tuple[str, str]:
    for owner, pattern in _KEYS.items():
        if re.fullmatch(pattern, key):
            return owner, key
    owner, _, name = key.rpartition(": ")
    return owner, name


KeptMean = tuple[Memory, str, tuple[int, ...]]
"""A chain's memory, and the name and the shape of a running mean that may be in it."""


def running_mean(memory: Memory, name: str, value: Tensor, momentum: float) -> Tensor:
    """Move the mean in ``memory``, "mean of <name>", towards ``value``; return it.

    Where ``value`` is not finite (an overflow, an empty batch) the mean does not change. A mean that is NaN or missing
    is not known yet: it becomes ``value``, or zero if that is not finite.
    """
    means, key, value = memory.of("means"), _mean(name), value.detach()
    old = means[key].to(value) if key in means else torch.full_like(value, nan)
    new = torch.where(old.isnan(), value, old.lerp(value, momentum))
    means[key] = torch.where(value.isfinite(), new, old.nan_to_num())
    return means[key]


def average_means(means: Sequence[KeptMean], like: Tensor) -> None:
    """Replace running means by their averages over the ranks of ``torch.distributed`` that have them; NaN if none has.

    Every rank takes part in one all-reduce, even if it has no means. Does not wait for the device.

    Args:
        means: the same list on all ranks.
        like: a tensor with the means' device and dtype; the dtype is float32 at least.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    # Not like.new_full: from a DTensor that would be a DTensor.
    none = torch.full((), nan, dtype=wide, device=like.device)
    kept = [(memory.of("means"), _mean(name), shape) for memory, name, shape in means]
    # Means from a checkpoint may still be on another device.
    own = torch.cat([at.get(key, none).to(none).expand(shape).flatten() for at, key, shape in kept])
    has = own.isfinite()
    total = torch.stack([own.where(has, torch.zeros_like(own)), has.to(wide)])
    distributed.all_reduce(total)
    averaged = (total[0] / total[1]).split([prod(shape) for *_, shape in kept])
    for (at, key, shape), mean in zip(kept, averaged, strict=True):
        # Not in place: a state_dict may share the tensor.
        at[key] = mean.reshape(shape).clone()


def _mean(name: str) -> str:
    return f"mean of {name}"
