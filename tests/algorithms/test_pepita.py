"""PEPITA, compared with its two passes by hand."""

import pytest
import torch
from layered_nets import convolutions, dense, drawn, run, two_passes
from torch import nn

from gradfree.algorithms import PEPITA
from gradfree.testing.cases.models import assert_equal_gradients, gradients

PEPITAS_SCALE = 0.05 * 2**0.5


@pytest.mark.parametrize("samples", [1, 3, 9])
def test_pepita_equals_its_two_passes_by_hand(samples):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(samples, 8)
    actual, matrices = run(net, x, PEPITA())
    expected = two_passes(net, x, 2 * net(x).detach(), PEPITAS_SCALE * matrices["0 (3, 8)"].T, second=True)
    assert_equal_gradients(actual, expected)


def test_pepita_on_convolutions_differentiates_at_the_second_passs_inputs():
    """Both passes by torch's functions, with the masks of the first pass in the second."""
    net, x = convolutions(), torch.randn(4, 2, 8, 8)
    actual, matrices = run(net, x, PEPITA())
    masks = {}
    for i in (2, 7):
        net[i].register_forward_hook(
            lambda layer, args, out, i=i: masks.update({i: (out / args[0]).detach().nan_to_num()})
        )
    torch.manual_seed(3)
    e = 2 * net(x).detach()
    norms = e.norm(dim=1)
    shift = torch.einsum("nc,cijk->nijk", e / norms[:, None], PEPITAS_SCALE * matrices["0 (3, 2, 8, 8)"])
    for p in net.parameters():
        p.grad = None
    h, other, waiting = x, (x - shift).detach(), None
    for i, layer in enumerate(net):
        if i == 10:
            layer(other).backward(e)
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            waiting = layer(other)
            h, other = layer(h).detach(), waiting.detach()
        else:
            h, other = (h * masks[i], other * masks[i]) if i in masks else (layer(h).detach(), layer(other))
        if i in (2, 4, 9):
            waiting.backward((h - other) * norms.view(-1, *[1] * (h.dim() - 1)))
    assert_equal_gradients(actual, {name: p.grad for name, p in net.named_parameters()})


def test_pepita_gives_modules_before_the_chain_the_gradient_f_e():
    net, x = nn.Sequential(nn.Linear(7, 8), dense(8, 6, 3, bend=nn.Tanh)), torch.randn(4, 7)
    with PEPITA().attach(net, ["1"]) as handle:
        found = gradients(net, lambda: net(x))
        matrix = drawn(handle, "1")["1.0 (3, 8)"]
    torch.testing.assert_close(found["0.weight"], (2 * net(x) @ matrix * PEPITAS_SCALE).T @ x)
