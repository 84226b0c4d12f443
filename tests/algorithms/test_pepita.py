"""PEPITA against its two passes written down by hand, and its mirroring."""

import copy

import pytest
import torch
import torch.nn.functional as F
from layered_nets import convolutions, cosine, dense, kept, products, run, with_weights
from torch import nn

import gradfree
from gradfree.algorithms import DFA, FA, FOTON, PEPITA, OrthogonalBackprop
from gradfree.testing.cases.models import assert_equal_gradients, gradients

PEPITAS_SCALE = 0.05 * 2**0.5


def pepita_by_hand(net, x, feedback):
    """The two passes for Linear-Tanh nets, sample by sample, with unit errors."""
    layers = list(with_weights(net).values())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with torch.no_grad():
        for sample in x:
            e = 2 * net(sample)
            h, other = sample, sample - feedback @ (e / e.norm())
            for layer in layers[:-1]:
                before, h, other = other, layer(h).tanh(), layer(other).tanh()
                layer.weight.grad += e.norm() * torch.outer(h - other, before)
                layer.bias.grad += e.norm() * (h - other)
            layers[-1].weight.grad += torch.outer(e, other)
            layers[-1].bias.grad += e
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("samples", [1, 3, 9])
def test_pepita_is_its_two_passes(samples):
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(samples, 8)
    actual, matrices = run(net, x, PEPITA())
    assert_equal_gradients(actual, pepita_by_hand(net, x, PEPITAS_SCALE * matrices["0 (3, 8)"].T))


def test_pepitas_feedback_is_a_product_if_it_is_mirrored():
    net, x = dense(8, 6, 5, 3, bend=nn.Tanh), torch.randn(4, 8)
    actual, matrices = run(net, x, PEPITA(mirror_every=5))
    product = matrices["4 (3, 5)"] @ matrices["2 (5, 6)"] @ matrices["0 (6, 8)"]
    assert_equal_gradients(actual, pepita_by_hand(net, x, PEPITAS_SCALE * product.T))


@pytest.mark.parametrize("option", [{}, {"mirror_every": 1}])
def test_pepitas_feedback_has_the_published_scale(option):
    """0.05 · √(2/inputs), the standard deviation of 0.05 · U(±√(6/inputs))."""
    net, x = dense(400, 300, 200, 300, bend=nn.Tanh), torch.randn(2, 400)
    _, matrices = run(net, x, PEPITA(**option))
    product = PEPITAS_SCALE * torch.linalg.multi_dot([*matrices.values()][::-1]) if option else None
    found = PEPITAS_SCALE * matrices["0 (300, 400)"] if product is None else product
    assert found.std().item() == pytest.approx(0.05 * (2 / 400) ** 0.5, rel=0.02)
    assert option or found.abs().max().item() == pytest.approx(0.05 * (6 / 400) ** 0.5, rel=0.01)


def test_pepita_with_fotons_feedback_is_foton_but_for_the_presynaptic_side():
    """Linear and orthogonal: h - h̃ = δ, and what is left is (h_l - h̃_l) (h_{l-1} - h̃_{l-1})ᵀ."""
    net, x = dense(9, 8, 8, 4), torch.randn(5, 9)
    gradfree.orthogonalize(net)
    product = products(net)["0"]
    foton, _ = run(net, x, FOTON())
    actual, _ = run(net, x, PEPITA(), kept({"0": product / PEPITAS_SCALE}))
    with torch.no_grad():
        e = 2 * net(x)
        norms = e.norm(dim=1, keepdim=True)
        shift = e / norms @ product
        for i, layer in enumerate(net):
            after = shift @ layer.weight.T if i < 2 else e / norms
            foton[f"{i}.weight"] = foton[f"{i}.weight"] - (norms * after).T @ shift
            shift = after
    assert_equal_gradients(actual, foton)


def test_pepita_on_convolutions_differentiates_at_the_second_passs_inputs():
    """Both passes written down with torch's functions; the masks of the first one in the second."""
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


def test_pepita_sends_what_lies_before_the_chain_the_inputs_modulation():
    net, x = nn.Sequential(nn.Linear(7, 8), dense(8, 6, 3, bend=nn.Tanh)), torch.randn(4, 7)
    with PEPITA().attach(net, ["1"]) as handle:
        found = gradients(net, lambda: net(x))
        matrix = handle.state_dict()["1"]["1.0 (3, 8)"]
    torch.testing.assert_close(found["0.weight"], (2 * net(x) @ matrix * PEPITAS_SCALE).T @ x)


def test_mirroring_leads_the_feedback_to_the_products_of_the_transposed_weights():
    net = nn.Sequential(nn.Conv2d(2, 8, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(8, 2, 4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    alignment, layers = [], []
    with PEPITA(mirror_every=2, mirror_rate=0.2).attach(net) as handle:
        for step in range(101):
            optimizer.zero_grad()
            F.cross_entropy(net(x), torch.arange(8) % 4).backward()
            if step % 50 == 0:
                state = handle.state_dict()[""]
                other = copy.deepcopy(net)
                for path, layer in with_weights(other).items():
                    layer.weight.data = state[f"{path} {tuple(layer.weight.shape)}"]
                layers.append([cosine(a, b) for a, b in zip(weights(other), weights(net), strict=True)])
                alignment.append(cosine(end_to_end(other), end_to_end(net)))
            optimizer.step()
    assert alignment[0] < 0.3 < 0.5 < alignment[1] < alignment[2]
    assert alignment[2] > 0.8
    assert all(start < 0.3 and end > 0.8 for start, end in zip(layers[0], layers[2], strict=True))


def weights(net):
    return [layer.weight.detach() for layer in with_weights(net).values()]


def end_to_end(net):
    """Return the product of the net's linear parts, inputs × classes."""
    linear = nn.Sequential(*[layer for layer in net if not isinstance(layer, nn.Tanh)])
    with torch.no_grad():
        return linear(torch.eye(32).view(32, 2, 4, 4)) - linear(torch.zeros(1, 2, 4, 4))


def test_mirroring_keeps_norms_and_comes_as_often_as_asked():
    net, x = dense(8, 6, 3, bend=nn.Tanh), torch.randn(4, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    seen = []
    with PEPITA(mirror_every=2).attach(net) as handle:
        for _ in range(4):
            net(x).sum().backward()
            seen.append(handle.state_dict()[""]["0 (6, 8)"])
            optimizer.step()
    assert seen[0] is seen[1]
    assert not torch.equal(seen[1], seen[2])
    torch.testing.assert_close(seen[1].norm(), seen[2].norm())


def test_pepita_does_not_run_layers_with_a_state_twice():
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 4))
    assert "0 computes its weight with a state that it changes" in str(PEPITA().validate(net))
    assert all(engine.validate(net).ok for engine in (DFA(), FA(), OrthogonalBackprop()))
