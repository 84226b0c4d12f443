"""ParaRNN's layers: the paper's equations and initial weights, with the call signature of torch's layers."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.models import ParaGRU, ParaLSTM

LAYERS = {"para_gru": ParaGRU, "para_lstm": ParaLSTM}


def by_hand(layer, x, state):
    """Compute ParaRNN's equations as in the paper, with matrices diag(a); ``x`` (T, B, I)."""
    cell, width = layer.cell, layer.cell.hidden_size
    diag = [torch.diag(v) for v in cell.a.clamp(-0.5, 0.5)]
    b, bias = cell.weight.split(width), cell.bias.split(width)
    outs = []
    for step in x:
        p = [step @ w.T + add for w, add in zip(b, bias, strict=True)]
        if isinstance(layer, ParaGRU):
            (h,) = state
            z, r = torch.sigmoid(h @ diag[0] + p[0]), torch.sigmoid(h @ diag[1] + p[1])
            state = ((1 - z) * h + z * torch.tanh((h * r) @ diag[2] + p[2]),)
        else:
            (h, c), (c_f, c_o) = state, (torch.diag(v) for v in cell.c.clamp(-0.5, 0.5))
            f, g = torch.sigmoid(h @ diag[0] + c @ c_f + p[0]), torch.tanh(h @ diag[1] + p[1])
            c = f * c + (1 - f) * g
            o = torch.sigmoid(h @ diag[2] + c @ c_o + p[2])
            state = o * torch.tanh(c), c
        outs.append(state[0])
    return torch.stack(outs), state


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_equal_the_papers_equations_in_the_shapes_of_torchs_layers(name, given, batch_first):
    layer, x = LAYERS[name](3, 4, batch_first), torch.randn(7, 2, 3)
    torchs = (nn.GRU if name == "para_gru" else nn.LSTM)(3, 4, batch_first=batch_first)
    with torch.no_grad():
        layer.cell.a *= 3
    state = [torch.randn(1, 2, 4) if given else torch.zeros(1, 2, 4) for _ in range(layer.cell.parts)]
    out, expected = by_hand(layer, x, [part[0] for part in state])
    hx = None if not given else state[0] if name == "para_gru" else tuple(state)
    fed = x.transpose(0, 1) if batch_first else x
    actual, final = layer(fed, hx)
    like, like_final = torchs(fed, hx)
    assert actual.shape == like.shape
    torch.testing.assert_close(actual.transpose(0, 1) if batch_first else actual, out)
    for part, end, other in zip(
        *([f] if name == "para_gru" else f for f in (final, expected, like_final)), strict=True
    ):
        torch.testing.assert_close(part[0], end[0] if name == "para_gru" else end)
        assert part.shape == other.shape


def test_initial_weights_are_distributed_as_in_the_paper():
    """B Kaiming uniform, a and c Xavier normal, b zero."""
    cell = ParaLSTM(300, 500).cell
    assert cell.weight.abs().max() <= (6 / 300) ** 0.5
    assert cell.weight.std().item() == pytest.approx((2 / 300) ** 0.5, rel=0.01)
    assert not cell.bias.any()
    assert cell.a.shape == (3, 500)
    assert cell.c.shape == (2, 500)
    assert cell.a.std().item() == pytest.approx((2 / 503) ** 0.5, rel=0.1)


def test_clip_bounds_the_weights_of_the_state():
    gru, x = ParaGRU(3, 4), torch.randn(5, 2, 3)
    with torch.no_grad():
        gru.cell.a.fill_(2.0)
    free = ParaGRU(3, 4, clip=None)
    free.load_state_dict(gru.state_dict())
    assert not torch.allclose(gru(x)[0], free(x)[0])
    with torch.no_grad():
        free.cell.a.fill_(0.5)
    torch.testing.assert_close(gru(x)[0], free(x)[0])


@pytest.mark.parametrize("name", LAYERS)
def test_highway_bp_is_exact_without_sweeps_only_if_the_jacobian_is_diagonal(name):
    """Exact at k = 0 for ParaGRU, not for ParaLSTM, whose F has a 2×2 block for each unit."""
    layer, x = LAYERS[name](3, 4), torch.randn(9, 2, 3)
    expected = torch.autograd.grad(layer(x)[0].pow(2).sum(), list(layer.parameters()))
    with gradfree.create_engine("highway_bp", iterations=0).attach(layer):
        actual = torch.autograd.grad(layer(x)[0].pow(2).sum(), list(layer.parameters()))
    assert all(map(torch.allclose, actual, expected)) == (name == "para_gru")
