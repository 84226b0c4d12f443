"""Subclasses of torch's recurrent modules whose ``forward`` calls ``super().forward``."""

import copy
import pickle

import pytest
import torch
from oracles import off_by
from recurrent_tasks import everything
from torch import nn

import gradfree
from gradfree import ChainError


class BurnIn(nn.LSTM):
    """Starts from a learned state, and runs some steps that the loss does not use."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.h0, self.c0 = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 1, 4))
        self.calls = 0

    def forward(self, x, burn=3):
        self.calls += 1
        first = [part.expand(1, x.shape[1], 4).contiguous() for part in (self.h0, self.c0)]
        _, (h, c) = super().forward(x[:burn], tuple(first))
        return super().forward(2 * x[burn:], (h.tanh(), c))


class Inherited(BurnIn):
    pass


class Loop(nn.GRU):
    def forward(self, x, hx=None):
        return x.cumsum(0) @ self.weight_ih_l0.t(), hx


@pytest.mark.parametrize("kind", [BurnIn, Inherited])
def test_the_engine_solves_the_super_calls_of_a_subclass_and_of_its_copies(kind):
    layer, x = kind(3, 4), torch.randn(40, 2, 3, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine("shooting", segments=4).attach(layer) as handle:
        for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert off_by(everything(other, x), expected) < 1e-10
            assert type(other) is kind
            assert other.calls == 2
        assert handle.chains[""].solved
    assert "forward" not in vars(layer)


def test_a_forward_without_a_super_call_is_refused():
    layer, x = Loop(3, 4), torch.randn(5, 2, 3, requires_grad=True)
    with gradfree.create_engine("backprop").attach(layer), pytest.raises(ChainError, match=r"Loop.*super\(\)\.forward"):
        layer(x)
