"""What repeated measurements tell: means and medians with their intervals, differences by seed, the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from scipy import stats

Bar = tuple[float, float, float]
"""A value and the ends of its interval, as plots show them; NaN for an interval that is not known."""

_CONFIDENCE = 0.95
_ALIKE = 1e-4
"""Share of a difference by which several may differ, by rounding, and be the same."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % confidence interval, by Student's t.

    Attributes:
        mean: NaN if there are no values, or one of them is neither.
        margin: half the width of the interval; NaN if there are less than two values.
        count: number of values.
    """

    mean: float
    margin: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from ``values``, one a seed."""
        count = len(values)
        if not count or not all(map(isfinite, values)):
            return cls(nan, nan, count)
        if count == 1:
            return cls(values[0], nan, count)
        quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1))
        return cls(fmean(values), quantile * stdev(values) / sqrt(count), count)

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return self.mean - self.margin

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.mean + self.margin

    @property
    def bar(self) -> Bar:
        """The mean with the ends of its interval."""
        return self.mean, self.low, self.high

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.margin:.2f}"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Estimate the difference of ``own`` and ``other``, values by seed, from the seeds that both have.

    Differences that are the same but not 0, as those of accuracies on few examples easily are, have no interval:
    Student's t would make it 0 wide.
    """
    estimate = Estimate.of([own[seed] - other[seed] for seed in own if seed in other])
    alike = estimate.margin <= _ALIKE * abs(estimate.mean)
    return replace(estimate, margin=nan) if alike and estimate.mean else estimate


@dataclass(frozen=True)
class Spread:
    """A median of timing rounds with their quartiles; NaN where nothing was timed."""

    median: float = nan
    low: float = nan
    high: float = nan

    @classmethod
    def recorded(cls, results: Mapping[str, Any], name: str) -> Spread:
        """Return what :func:`gradfree.benchmarks.timing.speed.statistics` has recorded as ``name``."""
        return cls(results[name], *results[f"{name}_quartiles"])

    @property
    def relative(self) -> float:
        """The farther quartile's distance, as a share of the median."""
        return max(self.high - self.median, self.median - self.low) / self.median

    @property
    def bar(self) -> Bar:
        """The median with its quartiles."""
        return self.median, self.low, self.high

    def __rmul__(self, factor: float) -> Spread:
        """Return the same in another unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high)

    def __truediv__(self, other: Spread) -> Spread:
        """Return the ratio to what was timed elsewhere, between the farthest quartiles."""
        return Spread(self.median / other.median, self.low / other.high, self.high / other.low)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the (cost, goodness) that no other betters in one and equals in the other, by cost."""
    known = [n for n, point in enumerate(points) if all(map(isfinite, point))]
    front: list[int] = []
    for n in sorted(known, key=lambda n: (points[n][0], -points[n][1])):
        if not front or points[n][1] > points[front[-1]][1]:
            front.append(n)
    return front
