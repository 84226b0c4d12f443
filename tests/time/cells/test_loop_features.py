"""What people do with models works on cells that are called in loops as on layers, or is refused for the same reasons.

Every feature of ``gradfree.testing`` once, with engines and cells in turns.
"""

import pytest

import gradfree
from gradfree.testing import FEATURES
from gradfree.testing.cases.cases import CASES, RECURRENT

GRU, ANY = (case for case in CASES if case.name.endswith("called in a loop"))
ENGINES = ("backprop", "dsf", "shooting", "truncated", "auto", "fixed_point", "deeppcr")
REFUSED = {
    "create_graph=True": "no derivatives of their own",
    "attaching twice": "cell has an engine attached already",
    "a chain that does not exist": "no module 'bloks'",
}
ASKED = [feature for feature in FEATURES.values() if RECURRENT in feature.families]
QUICK = [feature for feature in ASKED if not feature.slow]
SLOW = [feature for feature in ASKED if feature.name in ("torch.compile of the model", "DDP, two ranks")]


def check(number, feature):
    """Try ``feature`` with the engine and the cell whose turn it is."""
    # Its parameters are of different shapes; and what has other parameters when it runs again is refused.
    case = GRU if number % 2 or feature.name in ("tied parameters", "torch.func.functional_call") else ANY
    refusal = feature.refusal(gradfree.create_engine(ENGINES[number % len(ENGINES)]), case)
    assert (refusal is None) == (feature.name not in REFUSED), refusal
    assert refusal is None or REFUSED[feature.name] in refusal


@pytest.mark.parametrize(("number", "feature"), list(enumerate(QUICK)), ids=[f.name for f in QUICK])
def test_everything_works_on_a_loop_or_is_refused(number, feature):
    check(number, feature)


@pytest.mark.parametrize(("number", "feature"), list(enumerate(SLOW, 1)), ids=[f.name for f in SLOW])
def test_loops_are_compiled_around_and_train_on_two_ranks(number, feature):
    check(number, feature)


def test_parameters_of_another_pass_are_refused_where_the_cell_runs_again():
    refusal = FEATURES["torch.func.functional_call"].refusal(gradfree.create_engine("backprop"), ANY)
    assert "other parameters in the backward pass" in refusal
