"""Verdicts on figures."""

from math import nan

import pytest

from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.facts import Estimate


def mean(value, margin, n):
    return Estimate(value, value - margin, value + margin, n)


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        (Estimate(0.5, 0.4, 0.9), "2.00× faster than nn.GRU"),
        (Estimate(1.5, 1.1, 2.0), "1.50× slower than nn.GRU"),
        (Estimate(0.9, 0.8, 1.0), "no difference in speed from nn.GRU seen"),
        (Estimate(1.1, 1.0, 1.2), "no difference in speed from nn.GRU seen"),
        (Estimate(), "not timed"),
    ],
)
def test_a_speed_is_significant_if_both_quartiles_are_on_one_side_of_one(spread, words):
    assert verdict.speed(spread, "nn.GRU") == words


@pytest.mark.parametrize(
    ("difference", "higher_is_better", "words"),
    [
        (mean(3.1, 0.4, 3), False, "perplexity +3.10 ± 0.40 (worse)"),
        (mean(3.1, 0.4, 3), True, "perplexity +3.10 ± 0.40 (better)"),
        (mean(-3.1, 0.4, 3), True, "perplexity -3.10 ± 0.40 (worse)"),
        (mean(0.4, 0.4, 3), True, "perplexity +0.40 ± 0.40 (no difference seen)"),
        (mean(-5.25, 36.02, 2), True, "perplexity -5.25 (too few seeds to tell)"),
        (mean(0.0, 0.0, 3), True, "perplexity the same with every seed"),
        (mean(-5.25, 0.02, 2), True, "perplexity -5.25 (too few seeds to tell)"),
        (mean(1.0, nan, 1), True, "perplexity +1.00 (too few seeds to tell)"),
        (mean(-7.5, nan, 2), True, "perplexity -7.50 (the same difference with every seed: no interval)"),
        (mean(nan, nan, 3), True, "perplexity not comparable, as a run diverged"),
        (mean(nan, nan, 0), True, "perplexity not compared"),
    ],
)
def test_a_score_differs_if_its_interval_excludes_zero(difference, higher_is_better, words):
    assert verdict.score("perplexity", difference, higher_is_better) == words


def test_unsteady_timings_are_counted_and_the_worst_named():
    spreads = {str(n): Estimate(1.0, 1.0 - n / 100, 1.0) for n in (5, 10, 11, 20, 40, 30)}
    assert verdict.steadiness(spreads) == (
        "Quartiles are within 10 % of the median, except for 4 of 6 timings; "
        "the widest: 40 (40 %), 30 (30 %), 20 (20 %)."
    )
    assert verdict.steadiness({"a": Estimate(1.0, 0.95, 1.05)}) == "Quartiles are within 10 % of the median."


def test_rows_beyond_a_limit_are_named_unless_they_only_scatter():
    ratios = {"plain": Estimate(1.0, 1.0, 1.0), "slow": Estimate(1.06, 1.01, 1.2), "noisy": Estimate(1.3, 0.9, 2.0)}
    assert verdict.beyond(ratios, 1.05, "plain") == "More than 1.05× plain's time: slow (1.06×)."
    assert verdict.beyond(ratios, 1.1, "plain") == "Nothing takes more than 1.1× plain's time."
