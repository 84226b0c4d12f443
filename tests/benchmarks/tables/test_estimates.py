"""Means with intervals, and differences by seed, for known numbers."""

from math import inf, isnan, nan

import pytest

from gradfree.benchmarks.tables.facts import Estimate, differences, estimates, means, run_fact, table


@pytest.mark.parametrize(
    ("values", "mean", "margin"),
    [
        # Student's t for n - 1 degrees of freedom at 0.975: 12.706, 4.303, 2.776.
        ([0.0, 2.0], 1.0, 12.706),
        ([1.0, 2.0, 3.0], 2.0, 4.303 / 3**0.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 2.776 * 2.5**0.5 / 5**0.5),
        ([7.0, 7.0, 7.0], 7.0, 0.0),
    ],
)
def test_the_interval_is_that_of_students_t(values, mean, margin):
    estimate = Estimate.of(values)
    assert (estimate.value, estimate.n) == (mean, len(values))
    assert estimate.margin == pytest.approx(margin, rel=1e-3)
    assert (estimate.low, estimate.high) == pytest.approx((mean - estimate.margin, mean + estimate.margin))


def test_without_two_finite_values_that_differ_there_is_no_interval():
    """Accuracies on 40 examples often differ by the same 2.5 %; an interval of width 0 would make this certain."""
    one, none, alike = Estimate.of([3.0]), Estimate.of([]), Estimate.of_differences([95.0 - 97.5, 90.00001 - 92.5])
    assert (one.value, one.n, none.n, alike.n) == (3.0, 1, 0, 2)
    assert isnan(none.value)
    assert isnan(one.margin)
    assert isnan(alike.margin)
    equal = Estimate.of_differences([0.0, 0.0])
    assert (equal.value, equal.margin) == (0.0, 0.0)
    for value in (nan, inf):
        diverged = Estimate.of([1.0, value, 1.0])
        assert isnan(diverged.value)
        assert (isnan(diverged.margin), diverged.n) == (True, 3)


def runs(**rows):
    """Return the facts of runs by row and seed."""
    return table(
        run_fact("score", "%", value, seed, row=row) for row, values in rows.items() for seed, value in values.items()
    )


def test_differences_pair_equal_seeds():
    """Seeds differ by 10, rows by about 1: the difference is visible only in pairs."""
    found = runs(own={0: 11.0, 1: 21.1, 2: 30.9, 4: 0.0}, other={2: 30.0, 1: 20.0, 0: 10.0, 3: 99.0}, alone={7: 1.0})
    facts = differences(found, "score", {"own": "other", "alone": "other"})
    (difference,) = estimates(facts, metric="score, difference to other").values()
    assert (difference.value, difference.n) == (pytest.approx(1.0), 3)
    assert difference.margin == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)
    assert facts["row"].to_list() == ["own"]


def test_means_group_by_row_metric_and_setting():
    groups = (("a", "x", "1", 1.0), ("a", "x", "2", 5.0), ("b", "x", "1", 7.0), ("a", "y", "1", 9.0))
    found = table(
        run_fact(metric, "%", value + 2.0 * seed, seed, row=row, setting=setting)
        for row, metric, setting, value in groups
        for seed in range(2)
    )
    averaged = means(found).select("row", "metric", "setting", "value", "n", "seed").rows()
    assert averaged == [(row, metric, setting, value + 1.0, 2, None) for row, metric, setting, value in groups]
