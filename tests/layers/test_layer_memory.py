"""Engines for layers store no more of a forward pass than backpropagation does, measured at the allocator."""

import pytest
import torch
from test_layers import ENGINES
from torch import nn

import gradfree
from gradfree.algorithms import FOTON
from gradfree.benchmarks.timing.allocations import allocations, peak_memory
from gradfree.testing.cases.models import gradients

STORED = {name: engine for name, engine in ENGINES.items() if "streaming" not in name}
BENDS = {
    "tanh": (nn.Tanh,),
    "relu": (nn.ReLU,),
    "gelu": (nn.GELU,),
    "gelu, dropout": (nn.GELU, lambda: nn.Dropout(0.1)),
    "dropout, tanh": (lambda: nn.Dropout(0.1), nn.Tanh),
}


def net(bends, depth=20, width=128):
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width, bias=False), *(b() for b in bends))]
    return nn.Sequential(*hidden, nn.Linear(width, 10, bias=False)).float()


def kept(bends, dtype, engine=None):
    """Return the bytes that a forward pass stores for the backward pass."""
    model, x = net(bends).to(dtype), torch.randn(256, 128, dtype=dtype)
    if engine is None:
        return sum(allocations(lambda: model(x).sum()))
    with engine.attach(model, [""]):
        return sum(allocations(lambda: model(x).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STORED)
def test_stored_activations_are_those_of_backpropagation(name, dtype):
    """One activation per layer."""
    plain = kept(BENDS["tanh"], dtype)
    assert plain > 20 * 256 * 128 * dtype.itemsize
    assert kept(BENDS["tanh"], dtype, STORED[name]) <= 1.05 * plain


@pytest.mark.parametrize("name", ["foton", "fa", "pepita", "orthogonal_backprop"])
def test_activations_are_freed_as_gradients_are_computed(name):
    """Each layer's activation is freed once its gradient exists: the peak is not the sum of both."""
    model, x = net(BENDS["tanh"], width=256), torch.randn(256, 256, dtype=torch.float32)
    activations, gradients = 20 * x.nbytes, sum(p.nbytes for p in model.parameters())
    with gradfree.create_engine(name).attach(model, [""]):
        model(x).sum().backward()  # State that the engine keeps between passes exists before.
        model.zero_grad()
        peak = peak_memory(lambda: model(x).sum().backward(), "cpu")
    assert peak < 0.8 * (activations + gradients)


@pytest.mark.parametrize("bend", ["dropout, tanh", "gelu", "gelu, dropout"])
@pytest.mark.parametrize("name", ["orthogonal_backprop", "dfa", "fa"])
def test_changes_in_place_of_values_that_autograd_saves_are_refused(name, bend):
    """Tanh saves its output, GELU its input: a change of either in place is refused, as without an engine."""
    # In the middle of several layers, some of which share nodes of the graph.
    depth = 8
    model, x = net(BENDS[bend], depth, width=4), torch.randn(3, 4, dtype=torch.float32)
    kept = {"dropout, tanh": 2, "gelu": 0, "gelu, dropout": 0}[bend] + depth // 2 * (1 + len(BENDS[bend]))
    with gradfree.create_engine(name).attach(model, [""]):
        states = [x]
        for layer in model:
            states.append(layer(states[-1]))
        with torch.no_grad():
            states[kept + 1].mul_(2)
        with pytest.raises((RuntimeError, gradfree.ChainError), match="has been modified by an inplace operation"):
            states[-1].sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_half_precision_differences_are_computed_in_single_precision(dtype):
    """In low-precision states the second pass's difference would be noise: it is computed in single precision."""
    torch.manual_seed(0)
    model, x = net(BENDS["tanh"], depth=8, width=64), torch.randn(32, 64, dtype=torch.float32)
    gradfree.orthogonalize(model)
    found = []
    for kind in (torch.float32, dtype):
        model, x = model.to(kind), x.to(kind)
        with FOTON().attach(model):
            found.append(gradients(model, lambda model=model, x=x: model(x).float()))
            found[-1] = torch.cat([g.flatten().float() for name, g in found[-1].items() if name != "16.weight"])
    assert torch.cosine_similarity(*found, dim=0) > 0.99
