"""What a chain keeps from pass to pass: running means, and their averages over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan, prod

import torch
from torch import Tensor, distributed

KeptMean = tuple[dict[str, Tensor], str, tuple[int, ...]]
"""A chain's memory, and the name and the shape of a running mean that it may keep."""

_MEAN = "mean of "


def running_mean(memory: dict[str, Tensor], name: str, value: Tensor, momentum: float) -> Tensor:
    """Move the mean that ``memory`` keeps as "mean of <name>" towards ``value``; return it.

    Where ``value`` is not finite (an overflow, an empty batch) the mean stays as it was; at first it is zero. A
    kept NaN is none yet.
    """
    key, value = _MEAN + name, value.detach()
    old = memory[key].to(value) if key in memory else torch.full_like(value, nan)
    new = torch.where(old.isnan(), value, old.lerp(value, momentum))
    memory[key] = torch.where(value.isfinite(), new, old.nan_to_num())
    return memory[key]


def average_means(means: Sequence[KeptMean], like: Tensor) -> None:
    """Replace running means by those over the ranks of ``torch.distributed`` that have them; NaN if none has.

    One collective on every rank, whichever means it has itself; nothing waits for the device.

    Args:
        means: the same on all ranks.
        like: of their device, and of their precision if that is more than single.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    none = like.new_full((), nan, dtype=wide)
    # Means from a checkpoint may still be elsewhere.
    own = torch.cat([memory.get(_MEAN + name, none).to(none).expand(shape).flatten() for memory, name, shape in means])
    has = own.isfinite()
    total = torch.stack([own.where(has, torch.zeros_like(own)), has.to(wide)])
    distributed.all_reduce(total)
    averaged = (total[0] / total[1]).split([prod(shape) for *_, shape in means])
    for (memory, name, shape), mean in zip(means, averaged, strict=True):
        # Not in place: states that were saved have the tensor.
        memory[_MEAN + name] = mean.reshape(shape).clone()
