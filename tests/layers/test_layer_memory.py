"""Engines for layers keep of a forward pass what backpropagation keeps, and no more; measured at the allocator."""

import pytest
import torch
from test_layers import ENGINES
from torch import nn

from gradfree.algorithms import FOTON, PEPITA
from gradfree.benchmarks.timing.profiles import kept_memory

STORED = {name: engine for name, engine in ENGINES.items() if "streaming" not in name}
BENDS = {
    "tanh": (nn.Tanh,),
    "relu": (nn.ReLU,),
    "gelu": (nn.GELU,),
    "gelu, dropout": (nn.GELU, lambda: nn.Dropout(0.1)),
    "dropout, tanh": (lambda: nn.Dropout(0.1), nn.Tanh),
}


def net(bends, depth=20, width=512):
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width, bias=False), *(b() for b in bends))]
    return nn.Sequential(*hidden, nn.Linear(width, 10, bias=False)).float()


def kept(bends, dtype, engine=None):
    """Return the bytes that a forward pass leaves for the backward pass."""
    model, x = net(bends).to(dtype), torch.randn(256, 512, dtype=dtype)
    if engine is None:
        return kept_memory(lambda: model(x).sum())
    with engine.attach(model, [""]):
        return kept_memory(lambda: model(x).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STORED)
def test_stored_activations_are_backpropagations(name, dtype):
    """20 layers of 512, batch 256: an activation a layer, 10 MiB in single precision."""
    plain = kept(BENDS["tanh"], dtype)
    assert plain > 20 * 256 * 512 * dtype.itemsize
    assert kept(BENDS["tanh"], dtype, STORED[name]) <= 1.05 * plain


@pytest.mark.parametrize("engine", [FOTON(), PEPITA()], ids=["foton", "pepita"])
@pytest.mark.parametrize("bend", BENDS)
def test_so_they_are_whatever_stands_behind_the_layers(engine, bend):
    """The states that a second pass is compared with are among those that autograd keeps."""
    assert kept(BENDS[bend], torch.float32, engine) <= 1.05 * kept(BENDS[bend], torch.float32)
