"""Means with intervals, differences by seed, medians with quartiles, the Pareto front: numbers known by heart."""

from math import inf, isnan, nan

import pytest

from gradfree.benchmarks.tables.estimates import Estimate, Spread, paired, pareto_front
from gradfree.benchmarks.timing.speed import statistics


@pytest.mark.parametrize(
    ("values", "mean", "margin"),
    [
        # Student's t of n - 1 degrees of freedom at 0.975, as any table of it has them: 12.706, 4.303, 2.776.
        ([0.0, 2.0], 1.0, 12.706),
        ([1.0, 2.0, 3.0], 2.0, 4.303 / 3**0.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2.776 * 2.5**0.5 / 5**0.5),
        ([7.0, 7.0, 7.0], 7.0, 0.0),
    ],
)
def test_the_interval_is_students(values, mean, margin):
    estimate = Estimate.of(values)
    assert (estimate.mean, estimate.count) == (mean, len(values))
    assert estimate.margin == pytest.approx(margin, rel=1e-3)
    assert (estimate.low, estimate.high) == (mean - estimate.margin, mean + estimate.margin)


def test_one_value_has_no_interval_and_none_no_mean():
    one, none = Estimate.of([3.0]), Estimate.of([])
    assert (one.mean, one.count, none.count) == (3.0, 1, 0)
    assert isnan(one.margin)
    assert isnan(none.mean)


@pytest.mark.parametrize("value", [nan, inf])
def test_a_run_that_diverged_is_not_averaged_away(value):
    estimate = Estimate.of([1.0, value, 1.0])
    assert isnan(estimate.mean)
    assert isnan(estimate.margin)
    assert estimate.count == 3


def test_differences_are_those_of_the_same_seed():
    """Seeds differ by 10, the two by 1 and at most 0.1 more or less: only pairs show it."""
    own, other = {0: 11.0, 1: 21.1, 2: 30.9, 4: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 3: 99.0}
    difference = paired(own, other)
    assert (difference.mean, difference.count) == (pytest.approx(1.0), 3)
    assert difference.margin == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert paired(own, {}).count == 0


def test_differences_that_are_all_the_same_have_no_interval():
    """Two accuracies on 40 examples easily differ by the same 2.5 %: an interval of 0 would make that a certainty."""
    alike = paired({0: 95.0, 1: 90.00001}, {0: 97.5, 1: 92.5})
    assert (alike.mean, alike.count) == (pytest.approx(-2.5, rel=1e-4), 2)
    assert isnan(alike.margin)
    equal = paired({0: 95.0, 1: 90.0}, {0: 95.0, 1: 90.0})
    assert (equal.mean, equal.margin) == (0.0, 0.0)


def test_a_spread_is_what_the_timing_recorded():
    recorded = statistics([2.0, 4.0, 6.0], [1.0, 1.0, 2.0])
    assert Spread.recorded(recorded, "time") == Spread(4.0, 2.0, 6.0)
    assert Spread.recorded(recorded, "ratio") == Spread(3.0, 2.0, 4.0)


def test_the_ratio_of_two_runs_is_as_wide_as_the_farthest_quartiles():
    assert Spread(4.0, 3.0, 6.0) / Spread(2.0, 1.0, 4.0) == Spread(2.0, 0.75, 6.0)
    assert Spread(4.0, 3.0, 6.0).relative == 0.5
    assert Spread(4.0, 1.0, 5.0).relative == 0.75


def test_the_pareto_front_has_what_nothing_else_betters():
    points = [(1.0, 5.0), (2.0, 5.5), (2.0, 6.0), (3.0, 6.0), (0.5, 1.0), (0.7, nan), (nan, 9.0), (4.0, 7.0)]
    assert pareto_front(points) == [4, 0, 2, 7]
    assert pareto_front([]) == []
