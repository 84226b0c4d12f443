"""Verdicts: sentences on how a row differs from its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from gradfree.benchmarks.tables.facts import FEWEST, Estimate

SAME = "no difference seen"
FEW = "too few seeds to tell"
_DIGITS = 2
"""Decimals of a difference; more are shown if it would otherwise be rounded to 0."""
_STEADY = 0.1
"""Quartiles within this share of the median are steady."""
_NAMED = 3
"""Maximal number of unsteady timings that are named."""


def speed(ratio: Estimate, baseline: str) -> str:
    """Return how fast a row is, given the ratio of its time to ``baseline``'s; quartiles around 1: no difference."""
    if isnan(ratio.value):
        return "not timed"
    if ratio.high < 1:
        return f"{1 / ratio.value:.2f}× faster than {baseline}"
    if ratio.low > 1:
        return f"{ratio.value:.2f}× slower than {baseline}"
    return f"no difference in speed from {baseline} seen"


def interval(seeds: int, fewest: int) -> str:
    """Return what ± is in a table whose rows have up to ``seeds`` seeds, and ``fewest`` or more."""
    words = f"95 % confidence interval of the mean over seeds (Student's t, n = {seeds})"
    return words if fewest >= FEWEST else f"{words}, from {FEWEST} seeds on: of fewer it is too wide to say anything"


def score(name: str, difference: Estimate, higher_is_better: bool) -> str:
    """Return how a score differs from the baseline's."""
    outcome, figures = change(difference, higher_is_better)
    return f"{name} {figures} ({outcome})" if figures else f"{name} {outcome}"


def change(difference: Estimate, higher_is_better: bool) -> tuple[str, str]:
    """Return the outcome and the figures of a difference, which is significant if its interval excludes 0."""
    if not difference.n:
        return "not compared", ""
    if isnan(difference.value):
        return "not comparable, as a run diverged", ""
    if difference.value == difference.margin == 0:
        return "the same with every seed", ""
    if isnan(difference.margin) and difference.n > 1:
        return "the same difference with every seed: no interval", signed(difference.value)
    if difference.n < FEWEST:
        return FEW, signed(difference.value)
    if difference.low <= 0 <= difference.high:
        outcome = SAME
    else:
        outcome = "better" if (difference.value > 0) == higher_is_better else "worse"
    digits = _DIGITS if outcome == SAME else _digits(difference.value)
    return outcome, f"{signed(difference.value, digits)} ± {difference.margin:.{digits}f}"


def signed(value: float, digits: int = 2) -> str:
    """Return ``value`` with its sign, rounded to ``digits`` decimals; zero has the sign +."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def _digits(value: float) -> int:
    """Return the number of decimals that shows a difference as not 0."""
    return next((digits for digits in range(_DIGITS, 9) if round(value, digits)), _DIGITS)


def steady(median: Estimate) -> bool:
    """Return whether the quartiles are near the median."""
    return median.relative <= _STEADY


def steadiness(spreads: Mapping[str, Estimate]) -> str:
    """Return a sentence that names the timings, by label, with the widest quartiles relative to the median."""
    far = [label for label, spread in spreads.items() if not steady(spread)]
    words = f"Quartiles are within {100 * _STEADY:.0f} % of the median"
    if not far:
        return f"{words}."
    worst = sorted(far, key=lambda label: -spreads[label].relative)[:_NAMED]
    named = ", ".join(f"{label} ({100 * spreads[label].relative:.0f} %)" for label in worst)
    return f"{words}, except for {len(far)} of {len(spreads)} timings; the widest: {named}."


def beyond(ratios: Mapping[str, Estimate], limit: float, baseline: str) -> str:
    """Return a sentence that names the rows, by label, that take more than ``limit`` times ``baseline``'s time.

    The median is beyond the limit, and the lower quartile beyond 1: rows that only scatter are not named.
    """
    found = [label for label, ratio in ratios.items() if ratio.value > limit and ratio.low > 1]
    slow = sorted(found, key=lambda label: -ratios[label].value)
    if not slow:
        return f"Nothing takes more than {limit:g}× {baseline}'s time."
    named = "; ".join(f"{label} ({ratios[label].value:.2f}×)" for label in slow)
    return f"More than {limit:g}× {baseline}'s time: {named}."
