"""Subclasses of torch's recurrent modules whose ``forward`` calls ``super().forward``."""

import copy
import pickle

import pytest
import torch
from oracles import off_by
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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


class Padded(nn.GRU):
    """Packs its input, as layers of forecasting packages do."""

    def forward(self, x, lengths):
        out, final = super().forward(pack_padded_sequence(x, lengths, enforce_sorted=False))
        return pad_packed_sequence(out)[0], final


class Inherited(Padded):
    pass


class Loop(nn.GRU):
    def forward(self, x, hx=None):
        return x.cumsum(0) @ self.weight_ih_l0.t(), hx


def gradients(layer, *args, **kwargs):
    out, _ = layer(*args, **kwargs)
    loss = (out * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum()
    return [out, *torch.autograd.grad(loss, [args[0], *layer.parameters()])]


CASES = {
    "a learned state and a burn-in": (lambda: BurnIn(3, 4), {"burn": 5}),
    "packed inside": (lambda: Inherited(3, 4), {"lengths": torch.tensor([40, 17])}),
}


@pytest.mark.parametrize("engine", ["backprop", "shooting", "fixed_point"])
@pytest.mark.parametrize("case", CASES)
def test_the_engine_solves_the_super_call_of_a_subclass(engine, case):
    make, kwargs = CASES[case]
    layer, x = make(), torch.randn(40, 2, 3, requires_grad=True)
    expected = gradients(layer, x, **kwargs)
    options = {"shooting": {"segments": 4}, "fixed_point": {"iterations": 40}}
    with gradfree.create_engine(engine, **options.get(engine, {})).attach(layer) as handle:
        assert off_by(gradients(layer, x, **kwargs), expected) < 1e-10
        assert handle.chains[""].solved
        assert type(layer) is type(make())
    assert getattr(layer, "calls", 2) == 2
    assert "forward" not in vars(layer)


def test_a_subclass_can_be_copied_and_pickled_with_its_engine():
    layer, x = BurnIn(3, 4), torch.randn(40, 2, 3, requires_grad=True)
    expected = gradients(layer, x)
    with gradfree.create_engine("backprop").attach(layer):
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(other) is BurnIn
            assert off_by(gradients(other, x), expected) < 1e-10


def test_a_forward_without_a_super_call_is_refused():
    layer, x = Loop(3, 4), torch.randn(5, 2, 3, requires_grad=True)
    with gradfree.create_engine("backprop").attach(layer), pytest.raises(ChainError, match=r"Loop.*super\(\)\.forward"):
        layer(x)
