"""Engines that are exact on short chains, and an assertion that their gradients are."""

import torch

import gradfree
from gradfree.testing.cases.models import (
    assert_equal_gradients,
    gradients,
)

EXACT = {
    "backprop": gradfree.create_engine("backprop", plain=False),
    "highway_bp": gradfree.create_engine("highway_bp", iterations=9),
    "fixed_point": gradfree.create_engine("fixed_point", iterations=9),
}


def assert_exact(engine, model, run, chains=None):
    """Assert that the engine's gradients of ``run`` equal autograd's with the same random numbers."""
    torch.manual_seed(1)
    expected = gradients(model, run)
    with engine.attach(model, chains):
        torch.manual_seed(1)
        assert_equal_gradients(gradients(model, run), expected)
