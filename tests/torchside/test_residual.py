"""The residual path read from a block's graph, and its running mean for DSF."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradfree
from gradfree.torchside.residual import residual_factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("halved", [lambda x, g: 0.5 * x + g, lambda x, g: (x + g) * 0.5, lambda x, g: x / 2 + g])
def test_the_mean_of_a_residual_path_times_a_python_number(halved, dtype):
    """Autograd saves the number as a wrapped tensor, whose mean() is garbage in float64."""
    torch.set_default_dtype(torch.float32)
    linear = nn.Linear(4, 4).to(dtype)
    factor, _ = read(lambda x: halved(x, torch.tanh(linear(x))), torch.randn(2, 4, dtype=dtype))
    assert torch.as_tensor(factor).mean().item() == 0.5


@pytest.mark.parametrize("sign", [1, -1])
def test_the_residual_path_through_two_relus_is_the_product_of_masks(sign):
    """For relu(x) ± relu(x + y), K is the sum or difference of both masks, from -1 to 2, not their union."""
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


def test_the_residual_path_through_a_layer_norm_is_its_scale():
    linear, norm = nn.Linear(4, 4), nn.LayerNorm(4)
    nn.init.normal_(norm.weight)
    x = torch.randn(8, 4)
    factor, _ = read(lambda x: norm(x + linear(x)), x)
    total = (x + linear(x)).detach()
    scale = norm.weight.detach() / (total.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    torch.testing.assert_close(factor, scale, rtol=1e-12, atol=1e-12)


def _swin(block, x):
    h = x + block(x)
    flat = h.reshape(-1, h.shape[-1])
    return (flat + block(flat)).reshape(x.shape)


NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True),
}


def mask():
    return torch.arange(6) > 2


# The block, and the diagonal of its Jacobian where g, the branch, counts for nothing.
READ = {
    "reshaped and back": (_swin, lambda x: 1.0),
    "transposed and back": (lambda g, x: (x.mT + g(x).mT).mT, lambda x: 0.0),
    "halves put together": (lambda g, x: torch.cat([x[..., :3], x[..., 3:]], -1), lambda x: 0.0),
    "lerp": (lambda g, x: torch.lerp(x, g(x), 0.3), lambda x: 0.7),
    "lerp by a tensor": (lambda g, x: torch.lerp(g(x), x, mask() * 0.3), lambda x: mask() * 0.3),
    "clone": (lambda g, x: x.clone() + g(x), lambda x: 1.0),
    "a mask behind a view": (lambda g, x: torch.relu(x.flatten(0, 1) + 2).view(x.shape), lambda x: (x > -2).double()),
}


@pytest.mark.parametrize("name", READ)
def test_the_residual_path_is_found_through_these_operations(name):
    block, expected = READ[name]
    linear, x = nn.Linear(6, 6), torch.randn(3, 4, 6)
    factor, _ = read(lambda x: block(lambda y: torch.tanh(linear(y)), x), x)
    factor = torch.as_tensor(factor, dtype=torch.float64).expand(x.shape)
    torch.testing.assert_close(factor, torch.as_tensor(expected(x), dtype=torch.float64).expand(x.shape))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_the_residual_path_through_other_norms_is_their_scale(name, training):
    """With fixed statistics, a norm is that linear map."""
    norm = NORMS[name]().train(training)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = 3 * torch.randn(5, 4, 6)
    factor, out = read(norm, x)
    shift = out - factor * x.detach()
    constant = shift.transpose(0, 1).flatten(1) if name == "batch" else shift.flatten(0, 1)
    torch.testing.assert_close(constant, constant[:, :1].expand_as(constant))


def test_a_declared_residual_path_is_used():
    """For blocks that hide it, and for others: gradients are exact at k = L, and K is the declared one."""
    model, x = nn.Sequential(*[Hidden() for _ in range(4)]), torch.randn(3, 4)
    expected = [p.clone() for p in torch.autograd.grad(model(x).sum(), list(model.parameters()))]
    engine = gradfree.create_engine("highway_bp", iterations=4)
    with engine.attach(model, residual=1.0):
        actual = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.testing.assert_close(list(actual), expected, rtol=1e-10, atol=1e-12)

    def first(engine, **options):
        with engine.attach(model, **options):
            return torch.autograd.grad(model(x).sum(), model[0].linear.weight)[0]

    for k in (0, 1):
        declared = first(gradfree.create_engine("highway_bp", iterations=k), residual=0.7)
        assert torch.equal(declared, first(gradfree.create_engine("dsf", feedback=0.7, iterations=k)))
    with pytest.raises(TypeError, match="residual must be a number"):
        engine.attach(model, residual="yes")


class Hidden(nn.Module):
    """x + g(x) after a custom autograd function."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Opaque.apply(x + torch.tanh(self.linear(x)))


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


def dropped(x):
    return nn.functional.dropout(x, 0.4)


def normed(x):
    return nn.functional.rms_norm(x, [6], torch.linspace(0.5, 2.0, 6))


@pytest.mark.parametrize("scaled", [dropped, normed])
def test_the_residual_path_through_what_scales_it_is_the_scale(scaled):
    """On a GPU these are kernels of their own."""
    x = torch.randn(5, 6)
    factor, out = read(scaled, x)
    torch.testing.assert_close(factor * x.detach(), out)
