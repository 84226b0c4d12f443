"""Orthogonal networks: engines for single layers find their chain, and FOTON is exact without activations."""

import pytest
import torch
from test_models import CASES, small
from torch import nn

import gradfree
from gradfree.algorithms import FOTON
from gradfree.testing.cases.models import assert_equal_gradients, gradients

MODELS = ("orthogonal_mlp", "orthogonal_lenet", "orthogonal_convnet")


def weighted(model):
    return [layer for layer in model.layers if isinstance(layer, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize("name", MODELS)
def test_foton_notes_only_activations_that_lose_information(name):
    assert FOTON().validate(small(name)).notes == []
    notes = FOTON().validate(small(name, activation="relu")).notes
    assert len(notes) == len(weighted(small(name))) - 1
    assert all("ReLU" in note for note in notes)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_foton_is_backpropagation_on_the_linear_network(name, streaming):
    model, x = small(name, activation="identity"), CASES[name][1]()
    expected = gradients(model, lambda: model(x))
    with FOTON(streaming=streaming).attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_are_orthogonal(name):
    for layer in weighted(small(name)):
        matrix = layer.weight.flatten(1)
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(matrix)))


@pytest.mark.parametrize("activation", ["abs", "groupsort"])
@pytest.mark.parametrize("name", MODELS)
def test_abs_and_groupsort_preserve_norms_and_foton_trains_them(name, activation):
    """Each activation's output has the norm of its input."""
    model, x = small(name, activation=activation), CASES[name][1]().double()
    model.double()
    activations = [layer for layer in model.layers if type(layer).__name__ in ("Abs", "GroupSort")]
    assert len(activations) == len(weighted(model)) - 1
    for layer in activations:
        layer.register_forward_hook(lambda _, args, out: torch.testing.assert_close(out.norm(), args[0].norm()))
    with FOTON().attach(model):
        found = gradients(model, lambda: model(x))
    assert all(g is not None and g.any() for g in found.values())


def test_the_default_convnet_keeps_the_number_of_elements_up_to_its_head():
    model, x = gradfree.create_model("orthogonal_convnet"), torch.randn(2, 3, 32, 32)
    for layer in model.layers[:-1]:
        x = layer(x)
        assert x.numel() == 2 * 3 * 32 * 32
    assert len(weighted(gradfree.create_model("orthogonal_convnet", stage_depth=3))) == 10


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("orthogonal_mlp", {"width": 13}, "width must be from 1 to in_features, 12, not 13: a layer with more outputs"),
        ("orthogonal_lenet", {"image_size": 8}, "dense layer must be from 1 to .* for image_size=8, 64, not 120"),
        ("orthogonal_convnet", {"channels": (8, 33)}, "channels must be from 1 to 4 times the 8 before, 32, not 33"),
        ("orthogonal_convnet", {"image_size": 6}, "image_size must be a multiple of 4, not 6"),
    ],
)
def test_layers_that_expand_or_do_not_fit_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        small(name, **options)
