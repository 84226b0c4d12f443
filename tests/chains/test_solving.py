"""Solving a chain by its engine or by backpropagation."""

import copy

import pytest
import torch

import gradfree
from gradfree.testing.cases.models import assert_equal_gradients, gradients, plain_model


def test_exactly_affects_only_the_chains_of_its_handle():
    """Another model's engine keeps working meanwhile; after the ``with``, also after an error, its own engine does."""
    engine = gradfree.create_engine("truncated")
    one, x = plain_model(), torch.randn(4, 6)
    other = copy.deepcopy(one)
    exact = gradients(one, lambda: one(x))
    with engine.attach(one) as handle, engine.attach(other):
        approximate = gradients(one, lambda: one(x))
        with handle.exactly():
            assert_equal_gradients(gradients(one, lambda: one(x)), exact)
            assert_equal_gradients(gradients(other, lambda: other(x)), approximate, tolerance=0.0)
            with handle.exactly():
                pass
            assert_equal_gradients(gradients(one, lambda: one(x)), exact)
        with pytest.raises(KeyError), handle.exactly():
            raise KeyError
        assert_equal_gradients(gradients(one, lambda: one(x)), approximate, tolerance=0.0)
    with pytest.raises(AssertionError):
        assert_equal_gradients(approximate, exact)
