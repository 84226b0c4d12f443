"""FOTON's second pass: streaming, dropout masks, a stored F, and repeated backward passes."""

import copy

import pytest
import torch
from foton_nets import FORMS, convolutions, foton_gradients, orthogonal
from layered_nets import dense
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from gradfree import ChainError
from gradfree.algorithms import FOTON
from gradfree.testing.cases.models import assert_equal_gradients, gradients

BENT_NETS = {
    "tanh": (lambda: dense(8, 8, 6, 4, bend=nn.Tanh), (5, 8)),
    "GELU, dropout behind": (lambda: dense(8, 8, 6, 4, bend=lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.4))), (5, 8)),
    "ReLU, dropout before": (lambda: dense(8, 8, 6, 4, bend=lambda: nn.Sequential(nn.Dropout(0.4), nn.ReLU())), (5, 8)),
    "dropped channels": (lambda: convolutions(lambda: nn.Sequential(nn.Tanh(), nn.Dropout2d(0.4))), (4, 3, 8, 8)),
    "max pool": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        (4, 1, 8, 8),
    ),
    "overlapping kernels": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
        (4, 2, 4, 4),
    ),
}


@pytest.mark.parametrize("perturbation", ["difference", "tangent"])
@pytest.mark.parametrize("kind", BENT_NETS)
def test_streaming_gives_the_same_gradients(kind, perturbation):
    """Dropout masks are drawn again alike, and later random numbers are those without the engine."""
    make, shape = BENT_NETS[kind]
    net, x = make(), torch.randn(shape)
    results = []
    for streaming in (False, True):
        torch.manual_seed(3)
        results.append(foton_gradients(net, x, streaming=streaming, perturbation=perturbation))
        results[-1]["what comes next"] = torch.rand(3)
    assert_equal_gradients(results[1], results[0], tolerance=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_masks_are_those_of_the_first_pass(form):
    """If every weight is the identity, h - h̃ = m₂ m₁ e with the masks m, visible in the biases' gradients."""
    net = nn.Sequential(*[part for _ in range(2) for part in (nn.Linear(50, 50), nn.Dropout(0.5))], nn.Linear(50, 50))
    for layer in (net[0], net[2], net[4]):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    masks = []
    for layer in (net[1], net[3]):
        layer.register_forward_hook(
            lambda layer, args, out: masks.append((out.detach() / args[0].detach()).nan_to_num())
        )
    x = torch.rand(1, 50) + 1
    with FOTON(**FORMS[form]).attach(net):
        net(x).sum().backward()
    torch.testing.assert_close(net[0].bias.grad, masks[0][0])
    torch.testing.assert_close(net[2].bias.grad, (masks[0] * masks[1].bool() * 2)[0])


def test_f_is_kept_for_refresh_feedback_every_optimizer_steps():
    net, x = orthogonal(dense(8, 6, 3)), torch.randn(5, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handle = FOTON(refresh_feedback_every=2).attach(net)
    kept = []
    for _ in range(4):
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        kept.append(handle.state_dict()[""]["foton: F from 0 to 1"])
        optimizer.step()
    assert kept[0] is kept[1]
    assert kept[2] is kept[3]
    assert not torch.equal(kept[1], kept[2])


def test_a_kept_f_belongs_to_the_layers_between_and_to_no_engine_that_keeps_none():
    net, x = dense(8, 8, 8, 4, bend=nn.Tanh), torch.randn(5, 8)
    expected = foton_gradients(net[2:], x)["2.weight"]
    with FOTON(refresh_feedback_every=2).attach(net, [""]) as handle:
        gradients(net, lambda: net(x))
        torch.testing.assert_close(gradients(net, lambda: net[2:](x))["2.weight"], expected)
        state = handle.state_dict()
    net[4].weight.data *= 2
    expected = foton_gradients(net, x)
    with FOTON().attach(net, [""]) as handle:
        handle.load_state_dict(state)
        assert_equal_gradients(gradients(net, lambda: net(x)), expected)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("what", ["a weight", "the input"])
def test_a_change_between_the_passes_is_refused(what, streaming):
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8)
    with FOTON(streaming=streaming).attach(net):
        out = net(x).sum()
        with torch.no_grad():
            (net[2].weight if what == "a weight" else x).mul_(2)
        with pytest.raises(ChainError, match="was changed in place between the forward and the backward pass"):
            out.backward()


def test_the_second_pass_does_not_continue_the_power_iteration_of_a_weight():
    net, x = dense(8, 6, 6, 3, bend=nn.Tanh), torch.randn(5, 8)
    spectral_norm(net[2])
    alone = copy.deepcopy(net)
    alone(x)
    foton_gradients(net, x)
    assert_equal_gradients(dict(net.named_buffers()), dict(alone.named_buffers()), tolerance=0.0)
