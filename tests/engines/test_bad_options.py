"""Bad options of engines: they raise at construction and name the option."""

import re
from math import inf, nan

import pytest
import torch

import gradfree

STREAM = ([], [1, None])
TOLERANCE = ([0.0, -1e-3, nan, inf], ["1e-3", True])
SEED, EVERY, MEMORY = ([-1], ["x"]), ([0], [2.5]), ([0, inf], ["2", True])
# Of each option values that no number may have, and what is no number of the kind.
BAD = {
    "backprop": {"plain": ([], [1])},
    "deeppcr": {"memory_limit": MEMORY},
    "dfa": {"seed": SEED},
    "drtp": {"seed": SEED},
    "dsf": {"iterations": ([-1], [1.5]), "feedback": (["gates", nan, [], torch.rand(2, 2)], [True])},
    "eprop": {"seed": SEED, "stream": STREAM},
    "fa": {"seed": SEED},
    "fixed_point": {"iterations": ([-1], [2.5, True]), "tolerance": TOLERANCE},
    "forward_gradient": {"samples": ([0], []), "sigma": ([0.0], ["1"]), "seed": SEED},
    "foton": {
        "temperature": ([0], ["hot"]),
        "streaming": ([], [1]),
        "perturbation": (["jvp"], []),
        "refresh_feedback_every": EVERY,
        "orthogonalize_every": EVERY,
        "orthogonalize_steps": EVERY,
    },
    "highway_bp": {
        "iterations": ([-1], [2.5, True]),
        "tolerance": TOLERANCE,
        "gamma": ([1.5, nan], ["0.2"]),
        "segments": ([0], [1.5]),
    },
    "mezo": {"samples": ([0], [1.5]), "epsilon": ([0.0, inf], ["1"]), "seed": SEED},
    "newton": {
        "jacobian": (["whole", None], []),
        "max_sweeps": ([0], [2.0]),
        "tolerance": ([0, 1e-16, nan], ["small"]),
    },
    "orthogonal_backprop": {"orthogonalize_every": EVERY},
    "pepita": {"seed": SEED},
    "predictive_coding": {"rate": ([0.0, 1.5], ["1"]), "iterations": ([-1], [1.0])},
    "rtrl": {"stream": STREAM},
    "shooting": {
        "segments": ([0], [2.0, "many"]),
        "burn": ([-1], [True]),
        "max_sweeps": ([-1], []),
        "tolerance": ([0, -1e-3, 1e-16, nan], ["small"]),
        "corrector": (["diagonal"], []),
    },
    "snap": {"stream": STREAM},
    "target_propagation": {
        "step": ([0.0, nan], ["1"]),
        "sigma": ([0.0, nan], [True]),
        "rate": ([-1.0, inf], ["1"]),
        "seed": SEED,
    },
    "truncated": {"window": ([0], [1.5])},
    "uoro": {"seed": SEED, "stream": STREAM},
}
ROWS = [
    (name, option, value, error)
    for name, options in BAD.items()
    for option, kinds in options.items()
    for values, error in zip(kinds, (ValueError, TypeError), strict=True)
    for value in values
]


@pytest.mark.parametrize(("name", "option", "value", "error"), ROWS)
def test_a_value_of_the_wrong_type_or_range_is_refused_with_the_option_name(name, option, value, error):
    with pytest.raises(error, match=rf"{option} must be|one finite number, or one for each unit"):
        gradfree.create_engine(name, **{option: value})


@pytest.mark.parametrize("name", gradfree.list_engines())
def test_an_unknown_option_raises_and_lists_the_known_ones(name):
    options = vars(gradfree.create_engine(name))
    with pytest.raises(TypeError, match="no option 'nothing'") as error:
        gradfree.create_engine(name, nothing=1)
    assert all(re.search(rf"\b{option}\b", str(error.value)) for option in BAD.get(name, {}) if option in options)


def test_iterations_and_tolerance_together_are_refused():
    with pytest.raises(ValueError, match=r"iterations=2 and tolerance=0.001; give one of them"):
        gradfree.create_engine("highway_bp", iterations=2, tolerance=1e-3)
