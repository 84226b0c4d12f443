"""What repeated measurements tell: means and medians with their intervals, differences by seed, the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

_CONFIDENCE = 0.95
_ALIKE = 1e-4
"""Share of a difference by which several may differ, by rounding, and be the same."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; NaN for what is not known.

    Attributes:
        value: a mean over seeds, or a median of timing rounds.
        low: the interval's lower end: of the mean's 95 % confidence interval, or the lower quartile.
        high: its upper end.
        n: number of seeds; 0 for a median.
    """

    value: float = nan
    low: float = nan
    high: float = nan
    n: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of ``values``, one a seed, with its interval by Student's t; NaN if one is not finite."""
        n = len(values)
        if not n or not all(map(isfinite, values)):
            return cls(n=n)
        if n == 1:
            return cls(values[0], n=n)
        quantile = float(stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
        mean, margin = fmean(values), quantile * stdev(values) / sqrt(n)
        return cls(mean, mean - margin, mean + margin, n)

    @classmethod
    def of_differences(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of ``values``, differences of the same seed.

        Differences that are the same but not 0, as those of accuracies on few examples easily are, have no interval:
        Student's t would make it 0 wide.
        """
        mean = cls.of(values)
        alike = mean.margin <= _ALIKE * abs(mean.value)
        return replace(mean, low=nan, high=nan) if alike and mean.value else mean

    @classmethod
    def recorded(cls, results: Mapping[str, Any], name: str) -> Estimate:
        """Return what :func:`gradfree.benchmarks.timing.side_by_side.statistics` has recorded as ``name``."""
        return cls(results[name], *results[f"{name}_quartiles"])

    @property
    def margin(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def relative(self) -> float:
        """The interval's farther end, as a share of the value."""
        return max(self.high - self.value, self.value - self.low) / self.value

    def __neg__(self) -> Estimate:
        return Estimate(-self.value, -self.high, -self.low, self.n)

    def __truediv__(self, other: Estimate) -> Estimate:
        """Return the ratio to what was timed elsewhere, between the farthest ends."""
        return Estimate(self.value / other.value, self.low / other.high, self.high / other.low)


def pareto_front(costs: Mapping[str, Estimate], goodness: Mapping[str, Estimate]) -> list[str]:
    """Return the rows that are shown to be better than all that cost less, by cost.

    Shown is what intervals that do not meet show; a goodness without an interval is taken at its word.
    """
    known = [row for row in goodness if row in costs and isfinite(costs[row].value) and isfinite(goodness[row].value)]
    front: list[str] = []
    reached = -inf
    for row in sorted(known, key=lambda row: (costs[row].value, -goodness[row].value)):
        own = goodness[row]
        least, most = (own.value if isnan(end) else end for end in (own.low, own.high))
        if least > reached:
            front.append(row)
            reached = most
    return front
