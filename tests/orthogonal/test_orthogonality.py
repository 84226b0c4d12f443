"""Weights that an engine keeps orthogonal: to which precision, after steps of which optimizers, and of which layers."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import gradfree
from gradfree.algorithms import FOTON
from gradfree.orthogonal.weights import drift, is_matrix, project, retract

SHAPES = {"square": (24, 24), "wide": (10, 24), "tall": (24, 10), "one row": (1, 8), "patches": (12, 3, 2, 2)}


def deviation(weight):
    """‖W Wᵀ - I‖ (Wᵀ W for tall ones) in the spectral norm, by singular values."""
    singular = torch.linalg.svdvals(weight.detach().flatten(1).double())
    return (singular.square() - 1).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_project_finds_the_nearest_orthogonal_matrix(shape):
    weight = torch.randn(shape)
    u, _, v = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    project([weight])
    torch.testing.assert_close(weight.flatten(1), u @ v)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_retraction_steps_correct_one_optimizer_step(shape, dtype):
    weights = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    project(weights)
    for weight in weights:
        weight += 0.02 * torch.nn.functional.normalize(torch.randn(shape), dim=(0, 1)).to(dtype)
    retract(weights, steps=2)
    assert max(map(deviation, weights)) < (0.05 if dtype is torch.bfloat16 else 1e-5)


def test_a_drift_whose_entries_cancel_is_seen():
    """W = I + u uᵀ with u = (1, -1, 0, 0) / √2 has a drift of 3, along u, whose sum is zero."""
    u = torch.tensor([1.0, -1.0, 0.0, 0.0]) / 2**0.5
    assert drift([torch.eye(4) + torch.outer(u, u)]).item() == pytest.approx(3.0, rel=1e-3)


def test_retraction_does_not_diverge_after_a_large_step():
    along_one_unit = torch.eye(8).index_put((torch.tensor(2), torch.tensor(2)), torch.tensor(20.0))
    weights = [torch.eye(8), 30 * torch.eye(8), 5 * torch.randn(8, 8), along_one_unit]
    for _ in range(20):
        retract(weights, steps=2)
    assert max(map(deviation, weights)) < 1e-5


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drift_estimates_the_spectral_norm(shape):
    weight = torch.randn(shape)
    project([weight])
    assert drift([weight]).item() < 1e-6
    weight *= 1.1
    assert drift([weight]).item() == pytest.approx(0.21, rel=0.2)


def test_is_matrix_is_true_for_linear_layers_and_kernels_without_overlap():
    assert is_matrix(nn.Linear(3, 4))
    assert is_matrix(nn.Conv2d(3, 4, 2, stride=2))
    assert is_matrix(nn.Conv1d(3, 4, 1))
    for layer in (
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Conv2d(3, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, 2, stride=2, dilation=2),
        parametrizations.orthogonal(nn.Linear(3, 3)),
        nn.Tanh(),
    ):
        assert not is_matrix(layer)


def net():
    """Float32: wide, square and tall layers, and an overlapping convolution, which does not change."""
    torch.set_default_dtype(torch.float32)
    layers = nn.Sequential(
        *(nn.Conv2d(1, 4, 2, 2), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.Flatten()),
        *(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 48), nn.Linear(48, 10)),
    )
    gradfree.orthogonalize(layers)
    return layers


def batch():
    return torch.randn(16, 1, 8, 8), torch.randint(10, (16,))


def largest(layers):
    return max(deviation(layer.weight) for layer in layers if is_matrix(layer))


def plain_loop(layers, optimizer, steps):
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(layers(x), y).backward()
        optimizer.step()


def test_retraction_follows_orthogonalize_every_and_does_not_change_other_layers():
    layers = net()
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    with FOTON(orthogonalize_every=3, orthogonalize_steps=2).attach(layers):
        found = []
        for _ in range(6):
            plain_loop(layers, optimizer, 1)
            found.append(largest(layers) < 1e-5)
    assert found == [False, False, True, False, False, True]
    assert deviation(layers[2].weight) > 0.01


def test_by_default_weights_are_retracted_after_a_drift():
    """At any learning rate: rarely if steps are small, often if they are large."""
    for rate, fewest, most in ((1e-4, 0, 0), (0.1, 1, 10), (0.3, 5, 60)):
        layers = net()
        optimizer = torch.optim.SGD(layers.parameters(), rate, momentum=0.9)
        moved, retractions, seen = [], 0, []
        # Runs before the engine's hook.
        optimizer.register_step_post_hook(lambda *_, of=layers, to=moved: to.append(of[4].weight.clone()))
        with FOTON(temperature=4.0).attach(layers):
            for _ in range(60):
                plain_loop(layers, optimizer, 1)
                retractions += not torch.equal(layers[4].weight, moved[-1])
                seen.append(largest(layers))
        assert fewest <= retractions <= most, rate
        assert max(seen) < 2


@pytest.mark.parametrize(("rate", "momentum"), [(0.03, 0.9), (0.1, 0.9), (0.3, 0.0)])
def test_orthogonal_backprop_keeps_weights_orthogonal_at_usual_rates(rate, momentum):
    layers = net()
    optimizer = torch.optim.SGD(layers.parameters(), rate, momentum=momentum)
    with gradfree.create_engine("orthogonal_backprop").attach(layers):
        for _ in range(60):
            plain_loop(layers, optimizer, 1)
            assert largest(layers) < 2e-3


def test_weights_are_retracted_on_any_device_as_on_the_cpu(device):
    """Drifts are copied to the CPU asynchronously."""
    first = nn.Sequential(nn.Linear(6, 6, device="cpu"), nn.Tanh(), nn.Linear(6, 3, device="cpu"))
    gradfree.orthogonalize(first)
    x, found = torch.randn(8, 6, device="cpu"), []
    for where in ("cpu", device):
        model, steps = copy.deepcopy(first).to(where), 0
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        with FOTON().attach(model):
            for _ in range(12):
                optimizer.zero_grad()
                model(x.to(where)).pow(2).sum().backward()
                before = [p.detach() - 0.3 * p.grad for p in model.parameters()]
                optimizer.step()
                steps += any(not torch.allclose(p, b) for p, b in zip(model.parameters(), before, strict=True))
        found.append((steps, *(p.detach().cpu() for p in model.parameters())))
    assert found[0][0] > 0
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1:], found[0][1:], rtol=1e-8, atol=1e-8)


def test_only_the_weight_that_has_drifted_is_retracted():
    layers = net()
    optimizer = torch.optim.SGD(layers.parameters(), 0.0)
    with FOTON().attach(layers):
        plain_loop(layers, optimizer, 1)
        layers[0].weight.data *= 1.1
        others = [layers[4].weight.clone(), layers[6].weight.clone()]
        plain_loop(layers, optimizer, 1)
        assert deviation(layers[0].weight) > 0.2, "the drift is read a step late"
        plain_loop(layers, optimizer, 1)
        assert deviation(layers[0].weight) < 0.05
    assert torch.equal(layers[4].weight, others[0])
    assert torch.equal(layers[6].weight, others[1])


def test_steps_of_other_optimizers_do_not_count():
    layers, other = net(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with FOTON(orthogonalize_every=1, orthogonalize_steps=2).attach(layers) as handle:
        other(torch.ones(2)).sum().backward()
        optimizer.step()
        assert "steps" not in handle.state_dict().get("", {})


@pytest.mark.parametrize(
    ("layer", "note"),
    [
        (nn.Linear(8, 16), "1 (Linear) expands, 8 to 16"),
        (nn.Conv2d(2, 9, 2, 2), "1 (Conv2d) expands, 8 to 9"),
        (nn.Linear(8, 8), "1 (Linear) has no orthonormal rows yet, ‖W Wᵀ - I‖ ="),
        (nn.Conv2d(8, 8, 3, padding=1), "1 (Conv2d) has overlapping windows and a plain weight"),
        (nn.MaxPool2d(2), "1 (MaxPool2d) selects elements"),
        (nn.AvgPool2d(2), "1 (AvgPool2d) does not keep norms"),
        (nn.ReLU(), "1 (ReLU) is far from linear at zero"),
    ],
)
def test_validate_reports_inexact_layers(layer, note):
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    gradfree.orthogonalize(first)
    report = FOTON().validate(nn.Sequential(first, layer, last), [""])
    assert report.ok
    assert len(report.notes) == 1
    assert report.notes[0].startswith(note)
    assert f"note: {note}" in str(report)


def test_an_engine_that_is_never_detached_is_freed_with_its_model():
    """Torch keeps its optimizer hooks for ever; they must not keep the model alive."""
    layers = net()
    FOTON().attach(layers)
    watched = weakref.ref(layers[0])
    del layers
    gc.collect()
    assert watched() is None
