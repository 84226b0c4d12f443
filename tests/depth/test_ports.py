"""Blocks whose state is not the first argument and the first output; ``programs`` has other arguments and outputs."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients


class MaskFirst(Plain):
    """Takes the state as the second argument and returns it as the second output."""

    def forward(self, scale, x):
        return scale.sum(), super().forward(x, scale)


class Derived(MaskFirst):
    pass


class MaskFirstPort(gradfree.Port):
    state = "x"

    def split(self, out):
        return out[1], out[0]

    def join(self, state, rest):
        return rest, state


@pytest.mark.parametrize("keyword", [False, True])
def test_a_registered_port_finds_the_state(keyword, monkeypatch):
    blocks = nn.ModuleList([MaskFirst(), Derived(), MaskFirst(), Derived()])
    model, x = nn.ModuleList([nn.Linear(6, 6), blocks]), torch.randn(4, 6)
    monkeypatch.setattr("gradfree.depth.ports._ports", {nn.Module: gradfree.Port})

    def run():
        h, scale = model[0](x), 2 * model[0].bias
        for block in model[1]:
            _, h = block(scale, x=h) if keyword else block(scale, h)
        return h

    expected = gradients(model, run)
    for registered in (False, True):
        with gradfree.create_engine("highway_bp", iterations=4).attach(model, ["1"]) as handle:
            assert_equal_gradients(gradients(model, run), expected)
        # Gradients are exact without the port, too, but the blocks are not one chain.
        assert bool(handle.chains["1"].splits) is not registered
        gradfree.register_port(MaskFirst, MaskFirstPort)
