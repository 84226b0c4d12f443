"""Passes that are no training are refused with the module's path, not by torch's own errors."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import layered_model, plain_model


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unsqueeze(1).expand(-1, 3, -1))[0]


MODELS = {
    "blocks": (plain_model, "highway_bp", "blocks"),
    "GRU": (lambda: Recurrent(nn.GRU(6, 6)), "backprop", "layer"),
    "cell": (lambda: Recurrent(gradfree.CellLayer(nn.GRUCell(6, 6))), "backprop", "layer.cell"),
    "layers": (layered_model, "fa", "blocks"),
}


def traced(model, x):
    torch.jit.trace(model, (x,))


def forward_mode(model, x):
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def compiled_autograd(model, x):
    import torch._dynamo.compiled_autograd

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        model(x).sum().backward()


@pytest.mark.parametrize("other", [traced, forward_mode, compiled_autograd])
@pytest.mark.parametrize("model", MODELS)
def test_other_passes_are_refused_by_path(model, other):
    make, engine, path = MODELS[model]
    model, x = make(), torch.randn(5, 6)
    with gradfree.create_engine(engine).attach(model), pytest.raises(ChainError, match=path):
        other(model, x)
    if other is not compiled_autograd:
        other(model, x)
