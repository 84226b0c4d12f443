"""Tensors that a chain keeps from pass to pass, and averages of its running means over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan, prod

import torch
from torch import Tensor, distributed


class Memory:
    """Tensors that a chain keeps from pass to pass, in a namespace for each owner; saved in checkpoints."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, Tensor]] = {}

    def of(self, owner: str) -> dict[str, Tensor]:
        """Return the mutable dict of ``owner``'s tensors by name; always the same object."""
        return self._owners.setdefault(owner, {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by their names in checkpoints, "owner: name"."""
        return {f"{owner}: {name}": kept for owner, own in self._owners.items() for name, kept in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all tensors by those of ``state``, from :meth:`state_dict`.

        Raises:
            ValueError: a name in ``state`` has no owner; nothing is loaded then.
        """
        self.check(state)
        for own in self._owners.values():
            own.clear()
        for key, kept in state.items():
            owner, _, name = key.rpartition(": ")
            self.of(owner)[name] = kept

    @staticmethod
    def check(state: Mapping[str, Tensor]) -> None:
        """Raise a ValueError if a name in ``state`` has no owner."""
        if foreign := [key for key in state if ": " not in key]:
            raise ValueError(
                f"{foreign[0]!r} is no name of a chain's state. Load what the handle's state_dict() returned."
            )


def running_mean(memory: Memory, name: str, value: Tensor, momentum: float) -> Tensor:
    """Move the mean ``name`` in ``memory`` towards ``value``; return it.

    Where ``value`` is not finite (an overflow, an empty batch) the mean does not change. A mean that is NaN or missing
    is not known yet: it becomes ``value``, or zero if that is not finite.
    """
    means, value = memory.of("means"), value.detach()
    old = means[name].to(value) if name in means else torch.full_like(value, nan)
    new = torch.where(old.isnan(), value, old.lerp(value, momentum))
    means[name] = torch.where(value.isfinite(), new, old.nan_to_num())
    return means[name]


def average_means(means: Sequence[tuple[dict[str, Tensor], str, tuple[int, ...]]], like: Tensor) -> None:
    """Replace running means by their averages over the ranks of ``torch.distributed`` that have them; NaN if none has.

    Every rank takes part in one all-reduce, even if it has no means. Does not wait for the device.

    Args:
        means: for each mean the tensors that it may be among, its name there and its shape: the same list on all ranks.
        like: a tensor with the means' device and dtype; the dtype is float32 at least.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    # Not like.new_full: from a DTensor that would be a DTensor.
    none = torch.full((), nan, dtype=wide, device=like.device)
    # Means from a checkpoint may still be on another device.
    own = torch.cat([at.get(name, none).to(none).expand(shape).flatten() for at, name, shape in means])
    has = own.isfinite()
    total = torch.stack([own.where(has, torch.zeros_like(own)), has.to(wide)])
    distributed.all_reduce(total)
    averaged = (total[0] / total[1]).split([prod(shape) for *_, shape in means])
    for (at, name, shape), mean in zip(means, averaged, strict=True):
        # Not in place: a state_dict may share the tensor.
        at[name] = mean.reshape(shape).clone()
