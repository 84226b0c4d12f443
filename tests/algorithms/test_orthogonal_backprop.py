"""Backpropagation with weights that are kept orthogonal."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layered_nets import NETS, dense, run, with_weights
from torch import nn

import gradfree
from gradfree.algorithms import OrthogonalBackprop
from gradfree.orthogonal.weights import drift, project, weights_of
from gradfree.testing.cases.models import assert_equal_gradients


@pytest.mark.parametrize("kind", NETS)
def test_orthogonal_backprop_has_the_exact_gradients(kind):
    make, shape = NETS[kind]
    net, x = make(), torch.randn(shape)
    expected, _ = run(net, x)
    assert_equal_gradients(run(net, x, OrthogonalBackprop())[0], expected)


def test_orthogonal_backprop_retracts_as_foton_does():
    """Autograd and a projection by hand give the same weights."""
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(5, 8)
    gradfree.orthogonalize(net)
    other = copy.deepcopy(net)

    def train(net):
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(5) % 4).backward()
            optimizer.step()
            yield

    with OrthogonalBackprop(orthogonalize_every=1, orthogonalize_steps=4, temperature=1.0).attach(net):
        for _ in train(net):
            assert drift(weights_of(with_weights(net).values())).max() < 1e-9
    for _ in train(other):
        project(weights_of(with_weights(other).values()))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
