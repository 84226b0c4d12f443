"""FOTON: equal to backpropagation for orthonormal linear layers, and always equal to the paper's two passes."""

import pytest
import torch
import torch.nn.functional as F
from foton_nets import FORMS, convolutions, foton_gradients, orthogonal
from layered_nets import NETS, dense, run, two_passes
from torch import nn

from gradfree.algorithms import FOTON, OrthogonalBackprop
from gradfree.testing.cases.models import assert_equal_gradients, gradients

LINEAR_NETS = {
    "more outputs than samples": (lambda: dense(12, 9, 9, 7, 7), (4, 12)),
    "more samples than outputs": (lambda: dense(12, 9, 9, 3), (7, 12)),
    "one sample": (lambda: dense(12, 9, 3), (1, 12)),
    "no sample": (lambda: dense(12, 9, 3), (0, 12)),
    "no bias": (lambda: nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 4, bias=False)), (5, 9)),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(9, 8)), nn.Sequential(nn.Identity(), nn.Linear(8, 4))),
        (5, 9),
    ),
    "convolutions": (convolutions, (2, 3, 8, 8)),
    "many images": (convolutions, (9, 3, 8, 8)),
    "space to depth": (
        lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 6, 1), nn.Flatten(), nn.Linear(24, 3)),
        (5, 3, 4, 4),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LINEAR_NETS)
def test_linear_nets_that_do_not_expand_get_exact_gradients(kind, form):
    make, shape = LINEAR_NETS[kind]
    net, x = orthogonal(make()), torch.randn(shape)
    expected = gradients(net, lambda: net(x))
    assert_equal_gradients(foton_gradients(net, x, **FORMS[form]), expected)


@pytest.mark.parametrize("kind", NETS)
def test_orthogonal_backprop_has_the_exact_gradients(kind):
    make, shape = NETS[kind]
    net, x = make(), torch.randn(shape)
    expected, _ = run(net, x)
    assert_equal_gradients(run(net, x, OrthogonalBackprop())[0], expected)


@pytest.mark.parametrize("streaming", [False, True])
def test_linear_layers_applied_at_every_position_get_exact_gradients(streaming):
    """Outputs (N, T, classes): F is applied to the error, since F as a matrix would have N·T·classes rows."""
    net, x = orthogonal(dense(6, 5, 4)), torch.randn(3, 7, 6)
    expected = gradients(net, lambda: net(x))
    assert_equal_gradients(foton_gradients(net, x, streaming=streaming), expected)


@pytest.mark.parametrize("form", FORMS)
def test_modules_before_and_after_the_chain_get_gradients(form):
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), orthogonal(dense(12, 9, 9, 7)), nn.Tanh(), nn.Linear(7, 2))
    x = torch.randn(4, 5)
    expected = gradients(net, lambda: net(x))
    with FOTON(**FORMS[form]).attach(net, ["2"]):
        assert_equal_gradients(gradients(net, lambda: net(x)), expected)


@pytest.mark.parametrize("widths", [(6, 9, 9, 4), (9, 4, 8, 8, 3), (3, 5, 7)])
def test_linear_nets_that_expand_get_the_projected_gradient(widths):
    """A Aᵀ δ with A = W_l ... W_1 replaces δ, for any weights, orthogonal or not."""
    net, x = dense(*widths), torch.randn(4, widths[0])
    expected = gradients(net, lambda: net(x))
    product = torch.eye(widths[0])
    for layer in net[:-1]:
        product = layer.weight.detach() @ product
        layer.weight.grad = product @ product.T @ layer.weight.grad
        layer.bias.grad = product @ product.T @ layer.bias.grad
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    for form in FORMS.values():
        assert_equal_gradients(foton_gradients(net, x, **form), expected)


@pytest.mark.parametrize("form", ["stored", "streaming", "F kept"])
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_tanh_nets_follow_the_papers_two_passes(samples, form):
    net, x, y = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(samples, 8), torch.randint(4, (samples,))
    with torch.no_grad():
        error = (net(x).softmax(-1) - F.one_hot(y, 4)) / samples
        feedback = (net[4].weight @ net[2].weight @ net[0].weight).T
    expected = two_passes(net, x, error, feedback)
    net.zero_grad()
    with FOTON(**FORMS[form]).attach(net):
        F.cross_entropy(net(x), y).backward()
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, expected)


def test_the_tangent_equals_the_difference_for_small_errors():
    """The bias gradients are the tangents themselves, summed over samples."""
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8)
    actual = foton_gradients(net, x, perturbation="tangent")
    with torch.no_grad():
        feedback = (net[4].weight @ net[2].weight @ net[0].weight).T
        h, shift = x, 2 * net(x) @ feedback.T
        for layer in (net[0], net[2]):
            h = torch.tanh(layer(h))
            shift = (1 - h**2) * (shift @ layer.weight.T)
            layer.bias.grad = shift.sum(0)
    torch.testing.assert_close(actual["0.bias"], net[0].bias.grad)
    torch.testing.assert_close(actual["2.bias"], net[2].bias.grad)
