"""Predictive coding: exact without damping; with damping, cotangents have binomial weights."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import assert_equal_gradients, gradients, plain_model


@pytest.mark.parametrize(("iterations", "rate"), [(4, 1.0), (100, 1.0), (100, 0.5)])
def test_without_damping_l_minus_1_iterations_are_exact_and_with_it_many(iterations, rate):
    model, x = plain_model(), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with gradfree.create_engine("predictive_coding", iterations=iterations, rate=rate).attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected, tolerance=1e-10)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_damped_errors_have_binomial_weights(rate):
    """With identity Jacobians, the gradient of the first of four biases, over three links, is P(successes >= 3)."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(4)))
    for block in model:
        nn.init.ones_(block[0].weight)
    trials, successes = 6, torch.arange(7.0)
    counts = torch.exp(torch.lgamma(torch.tensor(7.0)) - torch.lgamma(successes + 1) - torch.lgamma(7 - successes))
    chances = counts * rate**successes * (1 - rate) ** (trials - successes)
    with gradfree.create_engine("predictive_coding", iterations=trials, rate=rate).attach(model, [""]):
        model(torch.ones(1, 1)).sum().backward()
    for links, block in enumerate(reversed(model)):
        torch.testing.assert_close(block[0].bias.grad[0], chances[links:].sum())
