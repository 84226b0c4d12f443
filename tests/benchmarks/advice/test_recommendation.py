"""What is recommended in view of figures: never what is not faster beyond doubt, nor a gradient that is only akin."""

import re

import pytest

from gradfree.benchmarks.advice.contest import Contestant, Standings
from gradfree.benchmarks.advice.recommendation import advise
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.sweeps.sweep import row
from gradfree.fidelity import Agreement


def contestant(engine, cosine, times, memory=100, first=None, **options):
    who = row(engine, options) if engine else BACKPROP
    return Contestant(who, None, None, times, Agreement(cosine, 1.0, 0.0), memory, first)


PLAIN = contestant("", 1.0, [1.0] * 5)
SLOW, FAST, FASTER, UNSURE = [1.2] * 5, [0.7] * 5, [0.5] * 5, [0.5, 0.6, 0.9, 1.1, 1.2]


def compiled(ratio):
    return {"ratio": ratio, "ratio_quartiles": [ratio, ratio]}


@pytest.mark.parametrize(
    ("others", "compiler", "taken", "words"),
    [
        ([], "not compiled", None, "Stay with autograd: no engine could be timed."),
        ([contestant("dsf", 0.8, UNSURE), contestant("truncated", 1.0, SLOW)], "", None, "Stay with autograd: no eng"),
        (
            [contestant("dsf", 0.8, FASTER), contestant("shooting", 0.995, FAST)],
            "",
            "shooting",
            r"Take shooting: a step takes 0.70 .*0.9950\). dsf is faster \(0.50\), but its gradient only akin",
        ),
        ([contestant("dsf", 0.8, FASTER)], "", None, "Stay with autograd: .* dsf is faster .*gradfree bench run"),
        ([contestant("shooting", 1.0, FAST)], compiled(0.8), "shooting", "Take shooting"),
        ([contestant("shooting", 1.0, FAST)], compiled(0.6), None, "Stay with autograd, and compile: .* 0.60 .*0.70"),
        ([contestant("backprop", 1.0, FAST), contestant("shooting", 0.9998, FAST)], "", "backprop (default)", "Take"),
        (
            [
                contestant("shooting", 0.995, [0.4, 0.5, 0.5, 0.5, 0.6]),
                contestant("newton", 1.0, [0.4, 0.6, 0.6, 0.6, 0.7]),
            ],
            "",
            "shooting",
            "Take",
        ),
        (
            [contestant("shooting", 1.0, FAST, tolerance=1e-3), contestant("shooting", 1.0, FAST, tolerance=1e-5)],
            "",
            "shooting tolerance=1e-05",
            "Take shooting tolerance=1e-05",
        ),
        (
            [contestant("dsf", 0.995, FASTER), contestant("backprop", 1.0, FAST)],
            "",
            "dsf",
            r"With exactly autograd's gradient: backprop \(default\) \(0.70\)",
        ),
        ([contestant("foton", 1.0, SLOW, memory=60)], "", None, "In the least memory: foton, 0.60 of the peak"),
        ([contestant("dsf", float("nan"), FAST)], "", None, "Stay with autograd"),
    ],
)
def test_what_is_recommended(others, compiler, taken, words):
    """Of the engines that are faster beyond doubt, with backprop's gradient, the fastest; of rivals the most exact."""
    advice = advise(Standings(1, "", [PLAIN, *others], {}, []), compiler, None)
    assert advice.engine == taken
    assert re.search(words, advice.words)


def test_the_code_has_options_and_chains():
    taken = contestant("highway_bp", 1.0, FAST, iterations=2)
    advice = advise(Standings(1, "", [PLAIN, taken], {}, []), "", ["blocks"])
    assert advice.code == (
        "optimizer = gradfree.EngineOptimizer(optimizer, model, engine='highway_bp', iterations=2, chains=['blocks'])"
    )
