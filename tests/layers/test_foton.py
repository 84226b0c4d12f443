"""FOTON: equal to backpropagation where theory says so, and to the paper's two passes everywhere."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.algorithms import FOTON
from gradfree.testing.cases.models import assert_equal_gradients, gradients

WAYS = {
    "stored": {},
    "streaming": {"streaming": True},
    "tangent": {"perturbation": "tangent"},
    "streaming, tangent": {"streaming": True, "perturbation": "tangent"},
    "F kept": {"refresh_feedback_every": 3},
}


def dense(*widths, bend=None):
    """Linear layers of ``widths``, with ``bend`` between them."""
    layers = [nn.Linear(before, after) for before, after in pairwise(widths)]
    if bend is None:
        return nn.Sequential(*layers)
    return nn.Sequential(*[part for layer in layers[:-1] for part in (layer, bend())], layers[-1])


def convolutions(bend=nn.Identity):
    """Kernel = stride and non-expanding, from (N, 3, 8, 8) to (N, 5)."""
    first, second = nn.Conv2d(3, 12, 2, stride=2), nn.Conv2d(12, 20, 2, 2)
    return nn.Sequential(first, bend(), second, bend(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(20, 5))


def orthogonal(net):
    gradfree.orthogonalize(net)
    return net


def foton_gradients(net, x, **options):
    with FOTON(**options).attach(net, [""]):
        return gradients(net, lambda: net(x))


LINEAR_NETS = {
    "more outputs than samples": (lambda: dense(12, 9, 9, 7, 7), (4, 12)),
    "more samples than outputs": (lambda: dense(12, 9, 9, 3), (7, 12)),
    "one sample": (lambda: dense(12, 9, 3), (1, 12)),
    "no sample": (lambda: dense(12, 9, 3), (0, 12)),
    "one layer": (lambda: dense(6, 4), (3, 6)),
    "no bias": (lambda: nn.Sequential(nn.Linear(9, 9, bias=False), nn.Linear(9, 4, bias=False)), (5, 9)),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(9, 8)), nn.Sequential(nn.Identity(), nn.Linear(8, 4))),
        (5, 9),
    ),
    "convolutions": (convolutions, (2, 3, 8, 8)),
    "many images": (convolutions, (9, 3, 8, 8)),
    "in one dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2, 2), nn.Conv1d(4, 6, 3, 3), nn.Flatten(), nn.Linear(12, 3)),
        (2, 2, 12),
    ),
    "space to depth": (
        lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 6, 1), nn.Flatten(), nn.Linear(24, 3)),
        (5, 3, 4, 4),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LINEAR_NETS)
def test_linear_nets_that_do_not_expand_get_backpropagations_gradients(kind, way):
    make, shape = LINEAR_NETS[kind]
    net, x = orthogonal(make()), torch.randn(shape)
    expected = gradients(net, lambda: net(x))
    assert_equal_gradients(foton_gradients(net, x, **WAYS[way]), expected)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_layer_at_every_position_is_one_layer(streaming):
    """Outputs (N, T, classes): F is applied to the error, since as a matrix it would be N T classes wide."""
    net, x = orthogonal(dense(6, 5, 4)), torch.randn(3, 7, 6)
    expected = gradients(net, lambda: net(x))
    assert_equal_gradients(foton_gradients(net, x, streaming=streaming), expected)


def test_parametrised_convolutions_are_used_as_they_are_and_left_alone():
    """orthogonium's kernels overlap; their power iteration belongs to the forward pass, so nothing runs twice."""
    conv = pytest.importorskip("orthogonium.layers").AdaptiveOrthoConv2d
    torch.set_default_dtype(torch.float32)
    net = nn.Sequential(
        conv(3, 8, 4, stride=2, padding=1), conv(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 4), nn.Linear(4, 3)
    )
    gradfree.orthogonalize(net)
    x = torch.randn(4, 3, 8, 8)
    net(x)
    other = copy.deepcopy(net)
    expected = gradients(net, lambda: net(x))
    with FOTON().attach(other):
        actual = gradients(other, lambda: other(x))
    assert_equal_gradients(actual, expected, tolerance=1e-3)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())
    assert FOTON().validate(net).notes == []
    assert "0 computes its weight with a state of its own" in str(FOTON(streaming=True).validate(net))


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_before_and_behind_the_chain_learns_too(way):
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), orthogonal(dense(12, 9, 9, 7)), nn.Tanh(), nn.Linear(7, 2))
    x = torch.randn(4, 5)
    expected = gradients(net, lambda: net(x))
    with FOTON(**WAYS[way]).attach(net, ["2"]):
        assert_equal_gradients(gradients(net, lambda: net(x)), expected)


def test_an_activation_behind_the_last_layer_is_differentiated():
    net, x = (
        nn.Sequential(orthogonal(dense(9, 7, 5)), nn.Tanh(), nn.Unflatten(1, (5, 1)), nn.Sigmoid()),
        torch.randn(4, 9),
    )
    expected = gradients(net, lambda: net(x))
    for way in WAYS.values():
        assert_equal_gradients(foton_gradients(net, x, **way), expected)


@pytest.mark.parametrize("widths", [(6, 9, 9, 4), (9, 4, 8, 8, 3), (3, 5, 7)])
def test_linear_nets_that_expand_get_the_projected_gradient(widths):
    """In place of δ stands A Aᵀ δ with A = W_l ... W_1 (papers' theory for any weights, orthogonal or not)."""
    net, x = dense(*widths), torch.randn(4, widths[0])
    expected = gradients(net, lambda: net(x))
    product = torch.eye(widths[0])
    for layer in net[:-1]:
        product = layer.weight.detach() @ product
        layer.weight.grad = product @ product.T @ layer.weight.grad
        layer.bias.grad = product @ product.T @ layer.bias.grad
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    for way in WAYS.values():
        assert_equal_gradients(foton_gradients(net, x, **way), expected)


def papers_gradients(net, x, feedback, error):
    """The two passes of the paper for Linear-Tanh nets, written down sample by sample, with unit errors."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    for e, sample in zip(error, x, strict=True):
        norm = e.norm()
        h, other = sample, sample - feedback @ (e / norm)
        for layer in layers[:-1]:
            after, other = torch.tanh(layer(h)), torch.tanh(layer(other))
            layer.weight.grad += norm * torch.outer(after - other, h)
            layer.bias.grad += norm * (after - other)
            h = after
        layers[-1].weight.grad += torch.outer(e, h)
        layers[-1].bias.grad += e
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("way", ["stored", "streaming", "F kept"])
@pytest.mark.parametrize("samples", [1, 3, 9])
def test_tanh_nets_follow_the_papers_two_passes(samples, way):
    net, x, y = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(samples, 8), torch.randint(4, (samples,))
    with torch.no_grad():
        error = (net(x).softmax(-1) - F.one_hot(y, 4)) / samples
        feedback = (net[4].weight @ net[2].weight @ net[0].weight).T
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        expected = papers_gradients(net, x, feedback, error)
    net.zero_grad()
    with FOTON(**WAYS[way]).attach(net):
        F.cross_entropy(net(x), y).backward()
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, expected)


def test_the_tangent_is_the_limit_of_small_errors():
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


BENT_NETS = {
    "tanh": (lambda: dense(8, 8, 6, 4, bend=nn.Tanh), (5, 8)),
    "GELU, dropout behind": (lambda: dense(8, 8, 6, 4, bend=lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.4))), (5, 8)),
    "ReLU, dropout before": (lambda: dense(8, 8, 6, 4, bend=lambda: nn.Sequential(nn.Dropout(0.4), nn.ReLU())), (5, 8)),
    "convolutions": (lambda: convolutions(nn.Tanh), (4, 3, 8, 8)),
    "dropped channels": (lambda: convolutions(lambda: nn.Sequential(nn.Tanh(), nn.Dropout2d(0.4))), (4, 3, 8, 8)),
    "max pool": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 2, 2), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
        (4, 1, 8, 8),
    ),
    "overlapping kernels": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
        (4, 2, 4, 4),
    ),
    "circular, with a stride": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1, padding_mode="circular"), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)
        ),
        (4, 2, 4, 4),
    ),
}


@pytest.mark.parametrize("perturbation", ["difference", "tangent"])
@pytest.mark.parametrize("kind", BENT_NETS)
def test_streaming_gives_the_stored_forms_gradients(kind, perturbation):
    """The same dropout masks, too, drawn again; and what is random behind stays as without the engine."""
    make, shape = BENT_NETS[kind]
    net, x = make(), torch.randn(shape)
    results = []
    for streaming in (False, True):
        torch.manual_seed(3)
        results.append(foton_gradients(net, x, streaming=streaming, perturbation=perturbation))
        results[-1]["what comes next"] = torch.rand(3)
    assert_equal_gradients(results[1], results[0], tolerance=1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_masks_are_those_of_the_first_pass(way):
    """With every weight the identity, the masks alone make h - h̃ = m₂ m₁ e, seen in the biases' gradients."""
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
    with FOTON(**WAYS[way]).attach(net):
        net(x).sum().backward()
    torch.testing.assert_close(net[0].bias.grad, masks[0][0])
    torch.testing.assert_close(net[2].bias.grad, (masks[0] * masks[1].bool() * 2)[0])


def test_a_sample_without_an_error_has_no_gradient():
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(2, 8)
    with FOTON().attach(net):
        net(x)[0].sum().backward()
        both = {name: p.grad.clone() for name, p in net.named_parameters()}
        net.zero_grad()
        net(x[:1]).sum().backward()
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, both)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_temperature_sharpens_the_output_but_is_not_in_the_error(streaming):
    """e = softmax(T y) - t, though the derivative of the cross-entropy of T y is T times that."""
    net, x, y = orthogonal(dense(9, 7, 4)), torch.randn(3, 9), torch.randint(4, (3,))
    out = net(x)
    (F.cross_entropy(4 * out, y) / 4).backward()
    expected = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    with FOTON(temperature=4, streaming=streaming).attach(net):
        torch.testing.assert_close(net(x), 4 * out, rtol=0, atol=0)
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            torch.testing.assert_close(net(x), 4 * out, rtol=0, atol=0)
    assert_equal_gradients({name: p.grad for name, p in net.named_parameters()}, expected)
    assert torch.equal(net(x), out)


def test_f_is_kept_for_as_many_optimizer_steps_as_asked():
    net, x = orthogonal(dense(8, 6, 3)), torch.randn(5, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    handle = FOTON(refresh_feedback_every=2).attach(net)
    kept = []
    for _ in range(4):
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        kept.append(handle.state_dict()[""]["F to 1"])
        optimizer.step()
    assert kept[0] is kept[1]
    assert kept[2] is kept[3]
    assert not torch.equal(kept[1], kept[2])


def test_a_kept_f_from_a_checkpoint_follows_the_error():
    """Checkpoints load to the CPU; an F of another precision stands for one on another device."""
    net, x = orthogonal(dense(8, 6, 3)), torch.randn(5, 8)
    expected = foton_gradients(net, x)
    with FOTON(refresh_feedback_every=2).attach(net) as handle:
        gradients(net, lambda: net(x))
        state = handle.state_dict()
        handle.load_state_dict({"": {key: kept.float() for key, kept in state[""].items()}})
        assert_equal_gradients(gradients(net, lambda: net(x)), expected, tolerance=1e-5)
        assert handle.state_dict()[""]["F to 1"].dtype == x.dtype


def test_a_kept_f_wants_one_row_of_classes_a_sample():
    net = dense(6, 5, 4)
    with FOTON(refresh_feedback_every=2).attach(net):
        out = net(torch.randn(3, 7, 6))
        with pytest.raises(ChainError, match=r"takes outputs \(samples, classes\), but 1 returns \(3, 7, 4\)"):
            out.sum().backward()


@pytest.mark.parametrize("streaming", [False, True])
def test_low_precision_keeps_its_differences_in_single_precision(streaming):
    """bfloat16 has three digits: a difference of two passes in it would have none."""
    torch.set_default_dtype(torch.float32)
    net, x = orthogonal(dense(32, 24, 24, 24, 8, bend=nn.Tanh)), torch.randn(16, 32)
    exact = foton_gradients(net, x)
    exact = {name: g.clone() for name, g in exact.items()}
    half = copy.deepcopy(net).bfloat16()
    rounded = foton_gradients(half, x.bfloat16(), streaming=streaming)
    with torch.autocast("cpu", torch.bfloat16):
        net.zero_grad()
        with FOTON(streaming=streaming).attach(net):
            net(x).float().pow(2).sum().backward()
    mixed = {name: p.grad for name, p in net.named_parameters()}
    for name, g in exact.items():
        for other in (rounded[name].float(), mixed[name]):
            assert F.cosine_similarity(other.flatten(), g.flatten(), dim=0) > 0.999


def test_states_inside_the_chain_are_refused_as_part_of_the_loss():
    net, x, seen = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8), []
    net[1].register_forward_hook(lambda layer, args, out: seen.append(out))
    with FOTON().attach(net):
        loss = net(x).sum() + seen[0].sum()
        with pytest.raises(ChainError, match="the loss uses the output of 1, which lies inside the chain"):
            loss.backward()
    assert all(p.grad is None for p in net.parameters())


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


@pytest.mark.parametrize("streaming", [False, True])
def test_a_second_backward_pass_wants_the_first_to_keep_the_graph(streaming):
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8)
    with FOTON(streaming=streaming).attach(net):
        out = net(x).sum()
        out.backward(retain_graph=True)
        once = {name: p.grad.clone() for name, p in net.named_parameters()}
        out.backward()
        assert_equal_gradients({name: p.grad / 2 for name, p in net.named_parameters()}, once, tolerance=1e-14)
        with pytest.raises(ChainError, match="retain_graph=True"):
            out.backward()


def test_a_deep_copy_of_an_attached_model_has_the_engine_too():
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8)
    with FOTON().attach(net):
        expected = gradients(net, lambda: net(x))
        other = copy.deepcopy(net)
        assert_equal_gradients(gradients(other, lambda: other(x)), expected, tolerance=0.0)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(6), "1 is a BatchNorm1d, which this engine cannot take apart"),
        (nn.PReLU(), "1 is a PReLU, which this engine cannot take apart"),
        (nn.GRU(6, 6), "1 is a GRU, which this engine cannot take apart"),
        (nn.MaxPool1d(2, dilation=2), "1 is a MaxPool1d, which this engine cannot take apart"),
    ],
)
def test_unknown_layers_are_refused(layer, message):
    net = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 4))
    report = FOTON().validate(net, [""])
    assert len(report.problems) == 1
    assert report.problems[0].startswith(message)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "temperature must be positive and finite, not 0"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, not 'hot'"),
        ({"streaming": 1}, TypeError, "streaming must be True or False, not 1"),
        ({"perturbation": "jvp"}, ValueError, "perturbation must be 'difference' or 'tangent', not 'jvp'"),
        ({"refresh_feedback_every": 0}, ValueError, "refresh_feedback_every must be at least 1"),
        ({"orthogonalize_every": 0}, ValueError, "orthogonalize_every must be at least 1"),
        ({"orthogonalize_steps": 2.5}, TypeError, "orthogonalize_steps must be an int"),
    ],
)
def test_wrong_options_are_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        FOTON(**options)
