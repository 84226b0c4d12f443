"""Passes that a recorder of blocks may get wrong: gradients are autograd's, or an error names a path."""

import pytest
import torch
from torch.testing import assert_close
from unusual_nets import SAMPLES, WIDTH, Net
from unusual_passes import PASSES, REFUSED, SPLIT

import gradfree
from gradfree import ChainError

pytestmark = pytest.mark.filterwarnings("ignore:the engine on")

EXACT = {
    "highway_bp": lambda calls: ("highway_bp", {"iterations": calls - 1}),
    "fixed_point": lambda calls: ("fixed_point", {"iterations": calls - 1}),
    "truncated": lambda calls: ("truncated", {"window": calls}),
    "backprop": lambda calls: ("backprop", {"plain": False}),
}


def outcome(net, x, run):
    """Return all gradients after ``run``, by name, or the error."""
    try:
        found = run(net, x)
    except RuntimeError as error:
        return error
    by_name = {name: p.grad for name, p in [("x", x), *net.named_parameters()]}
    return by_name | {f"returned {i}": g for i, g in enumerate(found or [])}


def fresh(block):
    """Return a net and its input, the same in every call."""
    torch.manual_seed(0)
    return Net(block), torch.randn(SAMPLES, WIDTH, requires_grad=True)


def check(actual, expected, refused=None):
    """Assert that gradients are equal, or that the error has path and reason; what torch refuses must raise, too."""
    if isinstance(expected, RuntimeError):
        assert isinstance(actual, RuntimeError), f"no error, but without an engine: {expected}"
        return
    if refused is not None:
        assert isinstance(actual, ChainError)
        assert "blocks" in str(actual)
        assert refused in str(actual)
        return
    assert not isinstance(actual, RuntimeError), f"torch's error, which is none without an engine: {actual}"
    assert set(actual) <= set(expected)
    for name, gradient in actual.items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            assert_close(
                gradient, expected[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("engine", EXACT)
@pytest.mark.parametrize("name", PASSES)
def test_gradients_are_exact_or_refused(name, engine):
    run, block, calls = PASSES[name]
    expected = outcome(*fresh(block), run)
    net, x = fresh(block)
    engine, options = EXACT[engine](calls)
    with gradfree.create_engine(engine, **options).attach(net, ["blocks"]):
        check(outcome(net, x, run), expected, REFUSED.get(name))


@pytest.mark.parametrize("name", SPLIT)
def test_the_site_says_why_a_chain_is_split(name):
    run, block, *_ = PASSES[name]
    net, x = fresh(block)
    with gradfree.create_engine("highway_bp").attach(net, ["blocks"]) as handle:
        run(net, x)
    splits = handle.chains["blocks"].splits
    assert bool(splits) == bool(SPLIT[name])
    assert SPLIT[name] in " ".join(splits.values())
