"""Recommendations: only engines that are significantly faster and have autograd's gradient."""

import re

import pytest

from gradfree.benchmarks.advice.contest import Contestant, Standings
from gradfree.benchmarks.advice.recommendation import advise
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.sweeps.sweep import row
from gradfree.benchmarks.timing.side_by_side import statistics


def contestant(engine, cosine, times, **options):
    who = row(engine, options) if engine else BACKPROP
    return Contestant(who, None, times, statistics(times, [1.0] * 5), cosine)


PLAIN = contestant("", 1.0, [1.0] * 5)
SLOW, FAST, FASTER, UNSURE = [1.2] * 5, [0.7] * 5, [0.5] * 5, [0.5, 0.6, 0.9, 1.1, 1.2]


def compiled(ratio):
    return {"ratio": ratio, "ratio_quartiles": [ratio, ratio]}


@pytest.mark.parametrize(
    ("others", "compiler", "words"),
    [
        ([], "not compiled", "Stay with autograd: no engine could be timed."),
        ([contestant("dsf", 0.8, UNSURE), contestant("truncated", 1.0, SLOW)], "", "Stay with autograd: no eng"),
        (
            [contestant("dsf", 0.8, FASTER), contestant("shooting", 0.995, FAST)],
            "",
            r"Take shooting: a step is 1.43× faster .*0.9950\). dsf is 2.00× faster, but its gradient is only approx",
        ),
        ([contestant("dsf", 0.8, FASTER)], "", "Stay with autograd: .* dsf is 2.00× faster.*gradfree bench run"),
        ([contestant("shooting", 1.0, FAST)], compiled(0.8), "Take shooting"),
        ([contestant("shooting", 1.0, FAST)], compiled(0.6), "Stay with autograd, and compile: .* 1.67× .*1.43×"),
        ([contestant("backprop", 1.0, FAST), contestant("shooting", 0.9998, FAST)], "", r"Take backprop \(default\):"),
        (
            [contestant("shooting", 1.0, FAST, tolerance=1e-3), contestant("shooting", 1.0, FAST, tolerance=1e-5)],
            "",
            "Take shooting tolerance=1e-05",
        ),
        (
            [contestant("dsf", 0.995, FASTER), contestant("backprop", 1.0, FAST)],
            "",
            r"Take dsf.* With exactly autograd's gradient: backprop \(default\) \(1.43× faster\)",
        ),
    ],
)
def test_the_fastest_exact_enough_engine_is_recommended(others, compiler, words):
    """Among engines of equal speed, the most exact one is recommended."""
    advice = advise(Standings([PLAIN, *others], compiled=compiler), None)
    assert re.search(words, advice.words)


def test_an_exact_engine_is_preferred_to_an_approximate_one_that_is_faster_within_the_noise():
    noisy = contestant("fixed_point", 0.9999, [0.15, 0.15, 0.21, 0.47, 0.47], iterations=4)
    exact = contestant("shooting", 0.9998, [0.30, 0.26, 0.30, 0.32, 0.32])
    assert advise(Standings([PLAIN, noisy, exact]), None).words.startswith("Take shooting: a step is 3.33× faster")
    slower = contestant("fixed_point", 0.9999, [0.31, 0.27, 0.31, 0.32, 0.32], iterations=4)
    assert advise(Standings([PLAIN, slower, exact]), None).words.startswith("Take shooting: a step is 3.33× faster")
    steady = contestant("fixed_point", 0.9999, [0.2] * 5, iterations=4)
    assert advise(Standings([PLAIN, steady, exact]), None).words.startswith("Take fixed_point k=4")


def test_without_time_for_all_settings_nothing_is_said_of_the_others():
    slow, untried = contestant("truncated", 1.0, SLOW), [f"fixed_point k={k}" for k in range(7)]
    assert advise(Standings([PLAIN, slow], untried=untried), None).words == (
        "Stay with autograd for now: 1 of 8 settings were timed, none of them faster with autograd's gradient. Give a "
        "longer --budget."
    )


def test_the_code_has_options_and_chains():
    taken = contestant("highway_bp", 1.0, FAST, iterations=2)
    advice = advise(Standings([PLAIN, taken]), ["blocks"])
    assert advice.code == (
        "optimizer = gradfree.EngineOptimizer(optimizer, model, engine='highway_bp', iterations=2, chains=['blocks'])"
    )
