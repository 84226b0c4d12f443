"""The residual path read from a block's graph, and its running mean for DSF."""

from functools import cache

import pytest
import torch
from pretend_device import kernels
from torch import nn
from torch.autograd.graph import get_gradient_edge

import gradfree
from gradfree.depth import residual
from gradfree.depth.residual import residual_factor
from gradfree.testing.cases.models import assert_equal_gradients, gradients


def read(block, x):
    """K of one pass of a block, and its output."""
    x = x.requires_grad_()
    out = block(x)
    return residual_factor(out, get_gradient_edge(x)), out.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("halved", [lambda x, g: 0.5 * x + g, lambda x, g: (x + g) * 0.5, lambda x, g: x / 2 + g])
def test_the_mean_of_a_residual_path_times_a_python_number(halved, dtype):
    """Autograd saves the number as a wrapped tensor, whose mean() is garbage in float64."""
    torch.set_default_dtype(torch.float32)
    linear = nn.Linear(4, 4).to(dtype)
    factor, _ = read(lambda x: halved(x, torch.tanh(linear(x))), torch.randn(2, 4, dtype=dtype))
    assert torch.as_tensor(factor).mean().item() == 0.5


def _swin(g, x):
    h = x + g(x)
    flat = h.reshape(-1, h.shape[-1])
    return (flat + g(flat)).reshape(x.shape)


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
    # Masks from -1 to 2, not their union.
    "two masks": (lambda g, x: torch.relu(x) + torch.relu(x + 2), lambda x: (x > 0).double() + (x > -2)),
    "a mask less another": (
        lambda g, x: torch.relu(x) - torch.relu(x + 2),
        lambda x: (x > 0).double() - (x > -2).double(),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_residual_path_is_found_through_these_operations(name):
    block, expected = READ[name]
    linear, x = nn.Linear(6, 6), torch.randn(3, 4, 6)
    factor, _ = read(lambda x: block(lambda y: torch.tanh(linear(y)), x), x)
    factor = torch.as_tensor(factor, dtype=torch.float64).expand(x.shape)
    torch.testing.assert_close(factor, torch.as_tensor(expected(x), dtype=torch.float64).expand(x.shape))


NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "batch, evaluation": lambda: nn.BatchNorm1d(4).eval(),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True),
    "layer": lambda: nn.LayerNorm([4, 6]),
    "RMS": lambda: nn.RMSNorm([4, 6]),
    "dropout": lambda: nn.Dropout(0.4),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_residual_path_through_norms_and_dropout_is_their_scale(name):
    """With fixed statistics, a norm is that linear map."""
    norm = NORMS[name]()
    for weight in norm.parameters():
        nn.init.uniform_(weight, 0.5, 1.5)
    if hasattr(norm, "bias"):
        nn.init.zeros_(norm.bias)
    x = 3 * torch.randn(5, 4, 6)
    factor, out = read(norm, x)
    shift = (out - factor * x.detach()) / factor
    if name in ("RMS", "dropout"):
        torch.testing.assert_close(factor * x.detach(), out)
    else:
        dims = {"batch": (0, 2), "instance": (2,), "layer": (1, 2)}[name.partition(",")[0]]
        torch.testing.assert_close(shift, shift.mean(dims, keepdim=True).expand_as(shift))


class CellBlock(nn.Module):
    """A recurrent cell as a block, whose gate is the residual path: of h, or of an LSTM's c."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.linear = kind(4, 4), nn.Linear(4, 4)

    def forward(self, h):
        fed = self.linear(h)
        return self.cell(fed, h) if isinstance(self.cell, nn.GRUCell) else self.cell(fed, (torch.tanh(fed), h))[1]


@pytest.fixture
def fused_cells(monkeypatch):
    """Run recurrent cells on the CPU by the operations that they are on an accelerator."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.FUSED_CELLS.items():
        library.impl(name, kernel, "CPU")

    def gru_cell(x, h, w_ih, w_hh, b_ih, b_hh):
        return torch.ops.aten._thnn_fused_gru_cell(x @ w_ih.t(), h @ w_hh.t(), h, b_ih, b_hh)[0]

    def lstm_cell(x, state, w_ih, w_hh, b_ih, b_hh):
        return torch.ops.aten._thnn_fused_lstm_cell(x @ w_ih.t(), state[0] @ w_hh.t(), state[1], b_ih, b_hh)[:2]

    with monkeypatch.context() as patch:
        for owner in (torch, torch._VF):
            patch.setattr(owner, "gru_cell", gru_cell, raising=False)
            patch.setattr(owner, "lstm_cell", lstm_cell, raising=False)
        patch.setattr(residual, "_table", cache(residual._table.__wrapped__))
        yield
    library._destroy()


@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_the_gate_of_a_recurrent_cell_is_found_on_an_accelerator(kind, request, device):
    block, x = CellBlock(kind), torch.randn(3, 4)
    expected, out = read(block, x)
    if device == "cpu":
        request.getfixturevalue("fused_cells")
    found, out_of_fused = read(block, x)
    torch.testing.assert_close((found, out_of_fused), (expected, out))
    assert isinstance(found, torch.Tensor)


def test_the_output_of_an_lstm_cell_has_no_residual_path(request, device):
    """It is tanh(c) times a gate."""
    if device == "cpu":
        request.getfixturevalue("fused_cells")
    cell = nn.LSTMCell(4, 4)
    factor, _ = read(lambda c: cell(c, (c, c))[0], torch.randn(3, 4))
    assert factor == 0.0


def test_the_residual_path_of_complex_products_is_the_factor_of_cotangents():
    """On the CPU, since the tests' device has no complex numbers."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.polar(torch.ones(3), torch.rand(3)))

        def forward(self, x):
            return self.scale * x

    with torch.device("cpu"):
        model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(2, 3, dtype=torch.complex128)
    exact = gradients(model, lambda: model(x).abs().square())
    with gradfree.create_engine("highway_bp", iterations=0).attach(model, [""]):
        assert_equal_gradients(gradients(model, lambda: model(x).abs().square()), exact)


def test_a_mask_times_a_number_keeps_the_precision_of_states():
    class Block(nn.Module):
        def forward(self, x):
            return torch.relu(x + 1)

    torch.set_default_dtype(torch.float32)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    model = nn.Sequential(*(Block() for _ in range(3)))
    with gradfree.create_engine("highway_bp", iterations=0, gamma=0.2).attach(model, [""]):
        (found,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(found, 0.8**2 * (x > -1).to(x.dtype), rtol=1e-15, atol=0.0)


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
    with pytest.raises(ValueError, match="residual must be finite, not nan"):
        engine.attach(model, residual=float("nan"))


class Renamed(torch.autograd.Function):
    """torch.lerp by a number, of a torch that calls its node otherwise."""

    @staticmethod
    def forward(ctx, start, end, weight):
        ctx._saved_weight = weight
        return start + weight * (end - start)

    @staticmethod
    def backward(ctx, g):
        return (1 - ctx._saved_weight) * g, ctx._saved_weight * g, None


class Rebuilt(Renamed):
    """The same of a torch whose node keeps other things."""

    @staticmethod
    def forward(ctx, start, end, weight):
        ctx.weight = weight
        return start + weight * (end - start)

    @staticmethod
    def backward(ctx, g):
        return (1 - ctx.weight) * g, ctx.weight * g, None


class Mixing(nn.Module):
    """A block with torch.lerp, or with x + g(x)."""

    def __init__(self, mixes):
        super().__init__()
        self.linear, self.mixes = nn.Linear(4, 4), mixes

    def forward(self, x):
        branch = torch.tanh(self.linear(x))
        return torch.lerp(x, branch, 0.3) if self.mixes else x + branch


@pytest.mark.parametrize("mixes", [(True,) * 4, (True, False, True, False)], ids=["all blocks", "a mixed chain"])
def test_a_node_that_torch_renames_changes_no_gradient(mixes, monkeypatch):
    model, x = nn.Sequential(*map(Mixing, mixes)).double(), torch.randn(3, 4, dtype=torch.float64)

    def gradients():
        monkeypatch.setattr(residual, "_table", cache(residual._table.__wrapped__))
        with gradfree.create_engine("highway_bp", iterations=1).attach(model, [""], batched=False):
            return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    expected = gradients()
    monkeypatch.setattr(torch, "lerp", other_lerp(Renamed, torch.lerp))
    torch.testing.assert_close(gradients(), expected, rtol=1e-12, atol=1e-12)


def test_a_node_of_another_form_warns(monkeypatch):
    """Without it, gradients of few iterations would be less close to autograd's, and nothing would say so."""
    monkeypatch.setattr(torch, "lerp", other_lerp(Rebuilt, torch.lerp))
    monkeypatch.setattr(residual, "_table", cache(residual._table.__wrapped__))
    with pytest.warns(UserWarning, match="runs lerp by a number as an operation that gradfree does not know"):
        factor, _ = read(lambda x: torch.lerp(x, x.tanh(), 0.3), torch.randn(3))
    assert factor == 0.0


def other_lerp(function, lerp):
    return lambda x, y, weight: lerp(x, y, weight) if isinstance(weight, torch.Tensor) else function.apply(x, y, weight)


def test_each_operation_is_read_or_composed_of_others(device, recwarn):
    """On any device and torch: none warns."""
    residual._table.__wrapped__(torch.device(device).type)
    assert not recwarn.list


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
