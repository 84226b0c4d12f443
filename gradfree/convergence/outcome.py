"""When sweeps have settled, and when the sequential call is the better bet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log

import torch
from torch import Tensor


@dataclass
class Outcome:
    """How the sweeps went.

    Attributes:
        sweeps: how many there were.
        mismatches: after each look, relative to the largest number.
        settled: whether the result is right to the tolerance.
    """

    sweeps: int = 0
    mismatches: list[float] = field(default_factory=list)
    settled: bool = False


@dataclass(frozen=True)
class StoppingRule:
    """When to stop.

    Attributes:
        tolerance: the mismatch that is small enough.
        most: the most sweeps.
        worth: how many sweeps take as long as the sequential call does.
    """

    tolerance: float
    most: int
    worth: float = inf

    def should_stop(self, outcome: Outcome) -> bool:
        """Return whether the sequential call is the better bet, by the rate at which mismatches have decayed."""
        left, mismatches = self.most - outcome.sweeps, outcome.mismatches
        if left <= 0 or not isfinite(mismatches[-1]):
            return True
        if len(mismatches) == 1:
            return False
        rate = mismatches[-1] / mismatches[-2]
        return (left if rate >= 1.0 else min(left, log(self.tolerance / mismatches[-1]) / log(rate))) > self.worth


def finest_tolerance(dtype: torch.dtype) -> float:
    """Return the smallest mismatch that sweeps in ``dtype`` can be asked for, in multiples of what it resolves.

    Eight; two in formats of two bytes, whose matrix products are added up in float32.
    """
    return (2 if dtype.itemsize < 4 else 8) * torch.finfo(dtype).eps


def tolerance_for(tolerance: float | None, dtype: torch.dtype) -> float:
    """Return the tolerance for states of ``dtype``; ``None``: the usual one."""
    usual = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.0)
    return max(usual if tolerance is None else tolerance, finest_tolerance(dtype))


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is one."""
    low, high = x.aminmax()
    return torch.maximum(low.abs(), high.abs())


def relative(jumps: Sequence[Tensor], sizes: Sequence[Tensor]) -> float:
    """Return the largest number of ``jumps``, each relative to its size; waits for the device."""
    found = torch.stack([largest(jump).float() for jump in jumps])
    of = torch.stack([size.float() for size in sizes])
    # No jump is none also where all numbers are zero.
    return torch.where(found == 0, found, found / of).max().item()
