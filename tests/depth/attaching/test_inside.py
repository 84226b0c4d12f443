"""Losses on tensors from inside blocks: their VJP at a block's input is a direct cotangent of the state before it.

A block may return such tensors beside its state. If it stores them otherwise (attributes, hooks) and their graph shares
nodes with the state's, the graph must be retained.
"""

import pytest
import torch
from exact_engines import assert_exact
from torch import nn

from gradfree import ChainError
from gradfree.testing.cases.models import Model, Plain, assert_equal_gradients


class Routed(Plain):
    """Returns the logits of its router beside its state, in a container."""

    def forward(self, x):
        logits = self.linear(x)
        return x + torch.tanh(logits) * logits.softmax(-1), {"logits": (logits, [logits.sum()]), "name": "router"}


class Routers(nn.Module):
    def __init__(self, length=4):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Routed() for _ in range(length))

    def forward(self, x, which=(0, 2, 3)):
        h, extra = self.stem(x), 0.0
        for n, block in enumerate(self.blocks):
            h, rest = block(h)
            assert rest["name"] == "router"
            if n in which:
                extra = extra + rest["logits"][0].logsumexp(-1, keepdim=True) + rest["logits"][1][0] ** 2
        return self.head(h) + extra


@pytest.mark.parametrize("which", [(0,), (3,), (0, 1, 2, 3)])
def test_a_loss_on_extra_outputs_is_exact(engine, which):
    model, x = Routers(), torch.randn(4, 6)
    assert_exact(engine, model, lambda: model(x, which))


class Tapped(Plain):
    """Stores a tensor from its inside, which shares nodes with the state's graph."""

    def forward(self, x):
        self.tap = self.linear(x)
        return x + torch.tanh(self.tap)


class Apart(Plain):
    """Stores a tensor from its inside that shares no nodes."""

    def forward(self, x):
        self.tap = torch.sin(x)
        return super().forward(x)


def tapped(model, x):
    return model(x).pow(2).sum() + sum(block.tap.exp().sum() for block in model.blocks[1:])


@pytest.mark.parametrize("block", [Tapped, Apart])
def test_a_loss_on_a_tensor_that_a_block_stores(engine, block):
    model, x = Model([block() for _ in range(4)]), torch.randn(4, 6)

    def grads():
        model.zero_grad()
        tapped(model, x).backward(retain_graph=True)
        return {name: p.grad for name, p in model.named_parameters()}

    expected = grads()
    with engine.attach(model):
        assert_equal_gradients(grads(), expected)
        if block is Apart:
            model.zero_grad()
            tapped(model, x).backward()
            assert_equal_gradients({name: p.grad for name, p in model.named_parameters()}, expected)
        else:
            with pytest.raises(ChainError, match=r"(?s)inside blocks\.\d.*retain_graph=True.* beside the state"):
                tapped(model, x).backward()


def test_autograd_grad_of_a_tensor_before_the_chain_includes_losses_inside(engine):
    """torch.autograd.grad for an input or a layer before the chain, without a parameter of the chain."""
    model, x = Model([Apart() for _ in range(4)]), torch.randn(4, 6, requires_grad=True)

    def grads():
        return [torch.autograd.grad(tapped(model, x), [before])[0] for before in (x, model.stem.weight)]

    expected = grads()
    with engine.attach(model):
        assert_equal_gradients(dict(enumerate(grads())), dict(enumerate(expected)))


def test_a_loss_only_on_a_tensor_inside_is_refused(engine):
    model, x = Model([Tapped() for _ in range(3)]), torch.randn(4, 6)
    with engine.attach(model):
        model(x)
        with pytest.raises(ChainError, match=r"a tensor from inside blocks\.1, but no state"):
            model.blocks[1].tap.sum().backward()


class Bias(Plain):
    """Computes a bias for later blocks, as T5's first block does with its position bias, or passes it on."""

    def __init__(self, of_state):
        super().__init__()
        self.table, self.of_state = nn.Parameter(torch.randn(6)), of_state

    def forward(self, x, bias=None):
        if bias is None:
            bias = torch.cos(x * self.table) if self.of_state else torch.cos(self.table) ** 2
        return x + torch.tanh(self.linear(x) + bias), bias


@pytest.mark.parametrize("of_state", [False, True])
def test_a_bias_that_the_first_block_computes_for_all_is_exact(engine, of_state):
    """The chain is split after the first block, which returns the bias; the others return it unchanged."""
    model, x = nn.ModuleList(Bias(of_state) for _ in range(4)), torch.randn(4, 6, requires_grad=True)

    def run():
        h, bias = x, None
        for block in model:
            h, bias = block(h, bias)
        return h + bias**2

    assert_exact(engine, model, run, [""])
    with engine.attach(model, [""]) as handle:
        run()
    assert list(handle.chains[""].splits) == ["1"]
