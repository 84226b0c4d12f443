"""Arguments and outputs of blocks: the state may be a keyword argument, and the first entry of a returned container.

Gradients are exact, also for a loss on extra outputs; all outputs are the same as without an engine.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients

LENGTH = 4
EXACT = {
    "backprop": gradfree.create_engine("backprop", plain=False),
    "highway_bp": gradfree.create_engine("highway_bp", iterations=LENGTH),
    "dsf": gradfree.create_engine("dsf", iterations=LENGTH),
}


class Named(NamedTuple):
    h: Any
    weights: Any
    extra: Any


@dataclass(frozen=True)
class NoneFirst:
    loss: Any
    h: Any
    weights: Any
    extra: Any


@dataclass
class ModelOutput(OrderedDict):
    """Like Hugging Face's outputs: a dictionary of the fields that are set, which are attributes, too."""

    loss: Any = None
    h: Any = None
    weights: Any = None
    extra: Any = None

    def __post_init__(self):
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        make, _, *others = super().__reduce__()
        return make, tuple(getattr(self, field.name) for field in fields(self)), *others


def by_name(out):
    return out["h"], out["weights"], out["extra"]


def by_attribute(out):
    return out.h, out.weights, out.extra


# How a block builds its output, and how the model reads it.
OUTPUTS = {
    "tuple": (lambda *parts: parts, tuple),
    "list": (lambda *parts: [*parts], tuple),
    "named tuple": (Named, by_attribute),
    "dict": (lambda h, weights, extra: {"h": h, "weights": weights, "extra": extra}, by_name),
    "frozen dataclass, None first": (lambda *parts: NoneFirst(None, *parts), by_attribute),
    "ModelOutput": (lambda *parts: ModelOutput(None, *parts), by_name),
    "ModelOutput by attribute": (lambda *parts: ModelOutput(None, *parts), by_attribute),
}


class Block(Plain):
    """Returns its state, the weights of its branch and a list, and stores what it has returned."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, hidden_states, mask=None):
        weights = torch.sigmoid(self.linear(hidden_states))
        h = hidden_states + torch.tanh(self.linear(hidden_states)) * weights * (1.0 if mask is None else mask)
        self.returned = self.make(h, weights, [weights.sum()])
        return self.returned


class Network(nn.Module):
    """Stem, blocks that return more than a state, and a head; stores what the blocks have returned."""

    def __init__(self, output="tuple"):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        make, self.parts = OUTPUTS[output]
        self.blocks = nn.ModuleList(Block(make) for _ in range(LENGTH))
        self.call = lambda block, h: block(h)

    def forward(self, x):
        h, self.outputs = self.stem(x), []
        for block in self.blocks:
            self.outputs.append(self.call(block, h))
            h = self.parts(self.outputs[-1])[0]
        return self.head(h)


@pytest.mark.parametrize("engine", EXACT)
@pytest.mark.parametrize("output", OUTPUTS)
def test_states_and_losses_in_any_container_are_exact(output, engine):
    model, x = Network(output), torch.randn(4, 6)

    def run():
        out = model(x)
        weights, extra = model.parts(model.outputs[2])[1:]
        return out.sum() + model.parts(model.outputs[0])[1].sum() + weights.pow(3).sum() * extra[0]

    expected = gradients(model, run)
    plain = model.outputs
    with EXACT[engine].attach(model, ["blocks"]):
        assert_equal_gradients(gradients(model, run), expected)
    for block, ours, before in zip(model.blocks, model.outputs, plain, strict=True):
        assert type(ours) is type(before)
        assert torch.equal(model.parts(ours)[1], model.parts(before)[1])
        kept, unchanged = model.parts(block.returned)[0], model.parts(before)[0]
        assert kept.grad_fn.name() == unchanged.grad_fn.name(), "what the block has kept was changed"


@pytest.mark.parametrize("engine", EXACT)
def test_the_state_may_come_by_keyword_in_any_place(engine):
    model, x, mask = Network(), torch.randn(4, 6), torch.randn(6, requires_grad=True)
    scale = 2 * mask
    model.call = lambda block, h: block(mask=scale, hidden_states=h)
    expected = [*gradients(model, lambda: model(x)).items(), ("mask", mask.grad)]
    with EXACT[engine].attach(model):
        mask.grad, scale = None, 2 * mask
        actual = [*gradients(model, lambda: model(x)).items(), ("mask", mask.grad)]
    assert_equal_gradients(dict(actual), dict(expected))


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
@pytest.mark.parametrize("engine", EXACT)
def test_a_registered_port_finds_the_state(engine, keyword, monkeypatch):
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
        with EXACT[engine].attach(model, ["1"]) as handle:
            assert_equal_gradients(gradients(model, run), expected)
        # Gradients are exact without the port, too, but the blocks are not one chain.
        assert bool(handle.chains["1"].splits) is not registered
        gradfree.register_port(MaskFirst, MaskFirstPort)
