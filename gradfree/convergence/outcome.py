"""The convergence of sweeps: tolerances, mismatches, and when to fall back to the sequential call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log

import torch
from torch import Tensor

_COMMON, _GAP, _HOPS = 100.0, 100.0, 3
"""Numbers of a state up to the first are common, and so are those up to so many times a common one, in so many hops."""


@dataclass
class Outcome:
    """The result of the sweeps of one pass.

    Attributes:
        sweeps: their number.
        mismatches: the mismatch at each check, relative to the largest number.
        settled: whether the sweeps have converged to the tolerance.
        tolerance: the tolerance.
    """

    tolerance: float
    sweeps: int = 0
    mismatches: list[float] = field(default_factory=list)
    settled: bool = False


@dataclass(frozen=True)
class StoppingRule:
    """When to stop sweeping and fall back to the sequential call.

    Attributes:
        tolerance: the mismatch at which sweeps have converged.
        most: the most sweeps.
        worth: the number of sweeps that take as long as the sequential call.
    """

    tolerance: float
    most: int
    worth: float = inf

    def should_stop(self, outcome: Outcome) -> bool:
        """Return whether the sequential call is expected to be faster, from the rate at which mismatches decay."""
        left, mismatches = self.most - outcome.sweeps, outcome.mismatches
        if left <= 0 or not isfinite(mismatches[-1]):
            return True
        if len(mismatches) == 1:
            return False
        rate = mismatches[-1] / mismatches[-2]
        return (left if rate >= 1.0 else min(left, log(self.tolerance / mismatches[-1]) / log(rate))) > self.worth


def finest_tolerance(dtype: torch.dtype) -> float:
    """Return the smallest tolerance for sweeps in ``dtype``.

    That is 8 times the machine epsilon; 2 times for dtypes of two bytes, whose matrix products are summed in float32.
    """
    return (2 if dtype.itemsize < 4 else 8) * torch.finfo(dtype).eps


def coarsest_dtype(tensors: Iterable[Tensor], default: torch.dtype = torch.float64) -> torch.dtype:
    """Return the real dtype with the largest finest tolerance; ``default`` if all are integers or masks."""
    found = [t.dtype.to_real() for t in tensors if t.is_floating_point() or t.is_complex()]
    return max(found, key=finest_tolerance, default=default)


def tolerance_for(tolerance: float | None, dtype: torch.dtype, rounding: float = 0.0) -> float:
    """Return the tolerance for states of ``dtype``, by default the usual one, but never below the finest.

    Args:
        tolerance: the engine's option.
        dtype: of the states.
        rounding: as :func:`~gradfree.devices.hardware.product_rounding` returns it. Two trajectories that are nearly
            equal round to different factors, so that their difference never falls below a small multiple of it.
    """
    usual = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.0)
    return max(usual if tolerance is None else tolerance, finest_tolerance(dtype), 8 * rounding)


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is one."""
    return _larger(*x.aminmax()) if x.numel() else x.new_zeros((), dtype=torch.get_default_dtype())


def largest_of_rows(x: Tensor) -> Tensor:
    """Return the largest absolute value at each index of the first dimension, NaN if there is one."""
    if not x.numel():
        return x.new_zeros(len(x))
    x = x.unsqueeze(-1)
    others = tuple(range(1, x.dim()))
    # No copy of x, nor of its absolute values.
    return _larger(x.amin(others), x.amax(others))


def _larger(low: Tensor, high: Tensor) -> Tensor:
    """Return the larger absolute value. The smallest integer has none in its own dtype."""
    if not low.dtype.is_floating_point:
        low, high = low.float(), high.float()
    return torch.maximum(low.abs(), high.abs())


def so_far(sizes: Tensor, reverse: bool) -> Tensor:
    """Return the largest of ``sizes``, (T,), up to each step; with ``reverse`` from the last step on."""
    return sizes.flip(0).cummax(0).values.flip(0) if reverse else sizes.cummax(0).values


def relative_to_states(jumps: Sequence[Tensor], after: Sequence[Tensor], sizes: Sequence[Tensor]) -> float:
    """Return what :func:`relative` does, but a jump to a number behind a gap relative to that number only.

    A mask in the state, such as -1e9 for a probability of zero, says nothing about the numbers beside it. Cotangents
    are measured by their sizes, as these have the loss's scale.

    Args:
        jumps: of states.
        after: the numbers that the jumps lead to, none of them larger than its size.
        sizes: see :func:`relative`.
    """
    measured = [_before_the_gap(*each) for each in zip(jumps, after, sizes, strict=True)]
    return relative([jump for jump, _ in measured], [size for _, size in measured])


def _before_the_gap(jump: Tensor, after: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return a size before the gap, and a jump that is as large relative to it as the given one is to its number."""
    if not jump.is_floating_point() or not jump.numel():
        return jump, size
    own, common = after.abs(), torch.full((), _COMMON, dtype=after.dtype, device=after.device)
    for _ in range(_HOPS):
        common = torch.where(own <= _GAP * common, own, 0).amax().clamp(min=_COMMON)
    size = torch.minimum(size, common.to(size.dtype))
    each = size.view(*size.shape, *[1] * (jump.dim() - size.dim())).to(jump.dtype)
    return torch.where(own > each, jump * (each / own), jump), size


def relative(jumps: Sequence[Tensor], sizes: Sequence[Tensor]) -> float:
    """Return the largest absolute value in ``jumps``, each relative to its size; waits for the device.

    NaN where a size is infinite: relative to that every jump would be zero.

    Args:
        jumps: any tensors.
        sizes: one for each of them: a number, or one for each index of its first dimension.
    """
    size_of = largest_of_rows if sizes[0].dim() else largest
    found, of = torch.stack([size_of(jump) for jump in jumps]), torch.stack(list(sizes))
    of = torch.where(of.isfinite(), of, torch.nan)
    # Numbers in double precision may be smaller than those in single precision.
    wide = torch.promote_types(found.dtype, torch.float32)
    found, of = found.to(wide), of.to(wide)
    # Not 0 / 0 if all numbers are zero.
    return torch.where(found == 0, found, found / of).max().item()
