"""Engines and models by name: wrong names and options are met with the right ones."""

import pytest
import torch

import gradfree

HIGHWAY = gradfree.create_engine("highway_bp")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "highway",
            {},
            ValueError,
            "no engine is called 'highway'; there are: auto, backprop, deeppcr, dfa, dsf, ",
        ),
        (
            "highway_bp",
            {"iteration": 2},
            TypeError,
            "no option 'iteration'; its options are: iterations, tolerance, segments, gamma, block",
        ),
        ("Highway-BP", {}, ValueError, "Did you mean 'highway_bp'?"),
        ("HIGHWAY_BP", {}, ValueError, "Did you mean 'highway_bp'?"),
        (None, {}, TypeError, "the name of an engine must be a str, one of auto, backprop, deeppcr, "),
        ("highway_bp", {"block": 1}, TypeError, "block must be True or False, not 1"),
        ("highway_bp", {"iterations": -1}, ValueError, "iterations must be at least 0, not -1"),
        ("highway_bp", {"iterations": 2.5}, TypeError, "iterations must be an int of at least 0, not 2.5"),
        ("highway_bp", {"iterations": True}, TypeError, "iterations must be an int of at least 0, not True"),
        ("highway_bp", {"gamma": 1.5}, ValueError, "gamma must be from 0 to 1, not 1.5"),
        ("highway_bp", {"gamma": float("nan")}, ValueError, "gamma must be from 0 to 1, not nan"),
        ("highway_bp", {"gamma": "0.2"}, TypeError, "gamma must be a number from 0 to 1, not '0.2'"),
        ("fixed_point", {"window": 2}, TypeError, "no option 'window'; its options are: iterations"),
        ("truncated", {"window": 0}, ValueError, "window must be at least 1, not 0"),
    ],
)
def test_engine_names_and_options(name, options, error, message):
    with pytest.raises(error) as caught:
        gradfree.create_engine(name, **options)
    assert message in str(caught.value)


def test_help_names_the_engines():
    for name in gradfree.list_engines():
        assert f'``"{name}"``' in gradfree.create_engine.__doc__


def test_what_is_listed_of_the_package_is_for_users():
    rooms = {"algorithms", "benchmarks", "huggingface", "lightning", "models"}
    assert set(dir(gradfree)) == {*gradfree.__all__, "__version__", *rooms}


@pytest.mark.parametrize("model", [None, torch.relu, torch.optim.SGD([torch.zeros(1)], lr=0.1)])
def test_only_modules_have_chains(model):
    with pytest.raises(TypeError, match=r"^model must be an nn\.Module, not "):
        HIGHWAY.attach(model)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="takes only options given by name"):
        type(HIGHWAY)(4)


def test_model_names_and_options():
    with pytest.raises(
        ValueError, match="no model is called 'resnet'; there are: gpt, orthogonal_convnet, orthogonal_lenet"
    ):
        gradfree.create_model("resnet")
    with pytest.raises(TypeError, match="preact_resnet has no option 'layers'; its options are: depth, in_channels"):
        gradfree.create_model("preact_resnet", layers=3)
    with pytest.raises(TypeError, match="gpt: missing a required argument: 'vocab_size'; its options are: vocab_size"):
        gradfree.create_model("gpt")
