"""The residual path read off a block's graph, and the mean of it that DSF keeps."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradfree
from gradfree.torchside.residual import residual_factor


class Halved(nn.Module):
    """0.5 x + g(x), the factor before or behind the sum, or as a quotient."""

    def __init__(self, form):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.form = form

    def forward(self, x):
        g = torch.tanh(self.linear(x))
        return {"0.5 * x": lambda: 0.5 * x + g, "(x + g) * 0.5": lambda: (x + g) * 0.5, "x / 2": lambda: x / 2 + g}[
            self.form
        ]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["0.5 * x", "(x + g) * 0.5", "x / 2"])
def test_the_mean_of_a_residual_path_times_a_python_number(form, dtype):
    """Autograd saves the number as a tensor of a kind of its own, whose mean() is garbage in float64."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(*[Halved(form) for _ in range(4)]).to(dtype)
    with gradfree.create_engine("dsf", feedback="gate").attach(model) as handle:
        model(torch.randn(2, 4, dtype=dtype)).sum().backward()
        kept = handle.state_dict()[""]["mean of residual"]
    assert kept.dtype == dtype
    assert kept.item() == 0.5


@pytest.mark.parametrize("sign", [1, -1])
def test_a_state_that_passes_two_relus(sign):
    """relu(x) ± relu(x + y) sends back the sum of both masks, from -1 to 2, not one mask or the other."""
    x = torch.randn(5, 6, requires_grad=True).view(5, 6)
    state = get_gradient_edge(x)
    first, second = torch.relu(x), torch.relu(x + torch.randn(5, 6))
    out = first + second if sign == 1 else first - second
    (expected,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    assert set(expected.unique().tolist()) == ({0, 1, 2} if sign == 1 else {-1, 0, 1})
    assert torch.equal(torch.as_tensor(residual_factor(out, state), dtype=torch.float64), expected)


def read(block, x):
    """K of one pass of a block, and its output."""
    x = x.requires_grad_()
    out = block(x)
    return residual_factor(out, get_gradient_edge(x)), out.detach()


def test_behind_a_relu_the_residual_path_is_its_mask():
    """Zeros where the ReLU has cut the state off; there nothing may travel along the path."""
    linear = nn.Linear(4, 4)
    factor, out = read(lambda x: torch.relu(x + linear(x)), torch.randn(8, 4))
    assert 0 < (out == 0).sum() < out.numel()
    assert torch.equal(factor.to(out.dtype), (out > 0).to(out.dtype))


def test_behind_a_layer_norm_the_residual_path_is_its_scale():
    linear, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    x = torch.randn(8, 4)
    factor, _ = read(lambda x: norm(x + linear(x)), x)
    total = (x + linear(x)).detach()
    scale = norm.weight.detach() / (total.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    torch.testing.assert_close(factor, scale, rtol=1e-12, atol=1e-12)


def test_of_a_gated_sum_the_residual_path_is_the_gate():
    gate, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def block(x):
        t = torch.sigmoid(gate(x))
        return t * other(x) + (1 - t) * x

    x = torch.randn(8, 4)
    factor, _ = read(block, x)
    torch.testing.assert_close(factor, 1 - torch.sigmoid(gate(x)).detach(), rtol=1e-12, atol=1e-12)
