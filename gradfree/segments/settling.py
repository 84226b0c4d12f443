"""Sweeps over segments until what leaves each of them is what its neighbour was entered by.

Multiple shooting (Bock & Plitt 1984); with the gates' product as corrector a parareal (Lions, Maday & Turinici 2001). A
sweep runs all segments at once from what enters them. The first of them is entered by what is known, so that k sweeps
behind the first run are exact in k + 1 segments, and as many sweeps as there are borders everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.algebra.time_scan import scan


class Run(NamedTuple):
    """What all segments at once have given.

    Attributes:
        result: whatever they are run for.
        leaving: what leaves each, part by part of the state, (C, B, H).
        largest: of the numbers that mismatches are relative to, for each part.
    """

    result: Any
    leaving: Sequence[Tensor]
    largest: Sequence[Tensor]


@dataclass
class Outcome:
    """How the sweeps went.

    Attributes:
        mismatches: the largest jump at a border behind each run, relative to the largest number.
        settled: whether the last run is right to the tolerance.
    """

    mismatches: list[float] = field(default_factory=list)
    settled: bool = False

    @property
    def sweeps(self) -> int:
        """How many there were behind the first run."""
        return len(self.mismatches) - 1


@dataclass(frozen=True)
class Patience:
    """When to stop.

    Attributes:
        tolerance: the mismatch that is small enough.
        most: the most sweeps behind the first run.
        worth: how many sweeps take as long as the sequential call does.
    """

    tolerance: float
    most: int
    worth: float = inf

    def gone(self, mismatches: Sequence[float]) -> bool:
        """Tell whether the sequential call is the better bet, by the rate at which mismatches have decayed."""
        left = self.most - len(mismatches) + 1
        if left <= 0 or not isfinite(mismatches[-1]):
            return True
        if len(mismatches) == 1:
            return False
        rate = mismatches[-1] / mismatches[-2]
        return (left if rate >= 1.0 else min(left, log(self.tolerance / mismatches[-1]) / log(rate))) > self.worth


def settle(
    run: Callable[[Sequence[Tensor]], Run],
    entering: Sequence[Tensor],
    patience: Patience,
    reach: Callable[[], Sequence[Factor]] | None = None,
    reverse: bool = False,
) -> tuple[Any, Outcome]:
    """Run all segments until their borders fit, or patience is gone; waits for the device once a run.

    Args:
        run: all segments, from what enters them.
        entering: the first guess, part by part, (C, B, H); what enters the first segment to run is right.
        patience: when to stop.
        reach: the diagonals by which a change at one border is carried to the next, part by part, (C, B, H) or 0.0;
            ``None``: as if none were.
        reverse: whether segments run from the last to the first.

    Returns:
        The last run's result, and how it went.
    """
    outcome, factors = Outcome(), None
    here, there = (slice(None, -1), slice(1, None)) if reverse else (slice(1, None), slice(None, -1))
    while True:
        result, leaving, largest = run(entering)
        jumps = [end[there] - start[here] for end, start in zip(leaving, entering, strict=True)]
        outcome.mismatches.append(_relative(jumps, largest))
        # As many sweeps as borders are exact by themselves.
        exact = outcome.sweeps == len(entering[0]) - 1 and isfinite(outcome.mismatches[-1])
        outcome.settled = exact or outcome.mismatches[-1] <= patience.tolerance
        if outcome.settled or patience.gone(outcome.mismatches):
            return result, outcome
        if reach is not None:
            factors = reach() if factors is None else factors
            carried = zip(jumps, factors, strict=True)
            jumps = [scan(jump, d[:-1], reverse) if isinstance(d, Tensor) else jump for jump, d in carried]
        entering = [start.clone() for start in entering]
        for start, jump in zip(entering, jumps, strict=True):
            start[here] += jump


def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is one."""
    low, high = x.aminmax()
    return torch.maximum(low.abs(), high.abs())


def _relative(jumps: Sequence[Tensor], sizes: Sequence[Tensor]) -> float:
    found = torch.stack([largest(jump).float() for jump in jumps])
    of = torch.stack([size.float() for size in sizes])
    # No jump is none also where all numbers are zero.
    return torch.where(found == 0, found, found / of).max().item()
