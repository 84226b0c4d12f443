"""Engines for layers compute no more matrix products than their rules need."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradfree.algorithms import DFA, FA, FOTON, PEPITA, OrthogonalBackprop

DEPTH, WIDTH = 5, 6
PRODUCTS = {
    "backpropagation: forward, weights, back but to the input": (OrthogonalBackprop(), 3 * DEPTH - 1),
    "fa: as many": (FA(), 3 * DEPTH - 1),
    "dfa: forward, weights, besides its feedback": (DFA(), 2 * DEPTH),
    "pepita: forward, again, weights, besides its feedback": (PEPITA(), 3 * DEPTH),
    "foton: forward, feedback, again but for the last, weights": (FOTON(), 4 * DEPTH - 1),
}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("case", PRODUCTS)
def test_gradients_of_weights_need_one_product_per_layer(case):
    """Autograd must not compute the gradients of the layers' inputs, too."""
    engine, expected = PRODUCTS[case]
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    net, x = nn.Sequential(*layers[:-1]), torch.randn(WIDTH, WIDTH)
    with engine.attach(net, [""]), Products() as products:
        net(x).square().sum().backward()
    assert products.count == expected
