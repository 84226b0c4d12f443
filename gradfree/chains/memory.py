"""What a chain keeps from pass to pass, and the averages over ranks of its running means."""

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
"""What checkpoints call the tensors of owners that are as old as they; those of any other are "owner: name"."""


class Memory:
    """What a chain keeps from pass to pass, each owner in a namespace of its own; goes into checkpoints."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, Tensor]] = {}

    def of(self, owner: str) -> dict[str, Tensor]:
        """Return what ``owner`` keeps, by name: to read and to change. The same object always."""
        return self._owners.setdefault(owner, {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that is kept, by the names that checkpoints have for it."""
        return {_key(owner, name): kept for owner, own in self._owners.items() for name, kept in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Keep what is in ``state``, of :meth:`state_dict`, and nothing else."""
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
"""A chain's memory, and the name and the shape of a running mean that it may keep."""


def running_mean(memory: Memory, name: str, value: Tensor, momentum: float) -> Tensor:
    """Move the mean that ``memory`` keeps as "mean of <name>" towards ``value``; return it.

    Where ``value`` is not finite (an overflow, an empty batch) the mean stays as it was; at first it is zero. A
    kept NaN is none yet.
    """
    means, key, value = memory.of("means"), _mean(name), value.detach()
    old = means[key].to(value) if key in means else torch.full_like(value, nan)
    new = torch.where(old.isnan(), value, old.lerp(value, momentum))
    means[key] = torch.where(value.isfinite(), new, old.nan_to_num())
    return means[key]


def average_means(means: Sequence[KeptMean], like: Tensor) -> None:
    """Replace running means by those over the ranks of ``torch.distributed`` that have them; NaN if none has.

    One collective on every rank, whichever means it has itself; nothing waits for the device.

    Args:
        means: the same on all ranks.
        like: of their device, and of their precision if that is more than single.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    # Of a spread parameter, new tensors would be spread, too.
    none = torch.full((), nan, dtype=wide, device=like.device)
    kept = [(memory.of("means"), _mean(name), shape) for memory, name, shape in means]
    # Means from a checkpoint may still be elsewhere.
    own = torch.cat([at.get(key, none).to(none).expand(shape).flatten() for at, key, shape in kept])
    has = own.isfinite()
    total = torch.stack([own.where(has, torch.zeros_like(own)), has.to(wide)])
    distributed.all_reduce(total)
    averaged = (total[0] / total[1]).split([prod(shape) for *_, shape in kept])
    for (at, key, shape), mean in zip(kept, averaged, strict=True):
        # Not in place: states that were saved have the tensor.
        at[key] = mean.reshape(shape).clone()


def _mean(name: str) -> str:
    return f"mean of {name}"
