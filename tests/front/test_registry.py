"""Engines and models by name: errors for wrong names and options list the right ones."""

import pytest
import torch

import gradfree
from gradfree.cli import main
from gradfree.registry import engine_class

HIGHWAY = gradfree.create_engine("highway_bp")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("highway", {}, ValueError, "no engine is called 'highway'; there are: auto, backprop, deeppcr, dfa, "),
        ("highway_bp", {"iteration": 2}, TypeError, "no option 'iteration'; its options are: iterations, tolerance, "),
        ("highway_bp", {"iteration": 2}, TypeError, "Did you mean 'iterations'?"),
        ("Highway-BP", {}, ValueError, "Did you mean 'highway_bp'?"),
        ("autograd", {}, ValueError, "'autograd' is a model without an engine"),
        ("shooting", {"segments": "four"}, TypeError, "must be 'auto' or an int of at least 1, not 'four'"),
        ("foton", {"temperature": "learned"}, TypeError, "must be 'learnt' or a positive number, not 'learned'"),
        (None, {}, TypeError, "the name of an engine must be a str, one of auto, backprop, deeppcr, "),
    ],
)
def test_engine_names_and_options(name, options, error, message):
    with pytest.raises(error) as caught:
        gradfree.create_engine(name, **options)
    assert message in str(caught.value)


def test_an_engine_by_import_path(tmp_path, monkeypatch):
    """Import paths work wherever names do."""
    text = "from dataclasses import dataclass\nimport gradfree.algorithms\n"
    text += "@dataclass(frozen=True)\nclass Mine(gradfree.algorithms.FixedPoint):\n    gain: int = 1\nother = 1\n"
    (tmp_path / "mine_alone.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    engine = gradfree.create_engine("mine_alone:Mine", gain=2, iterations=3)
    assert (type(engine).__name__, engine.gain, engine.iterations) == ("Mine", 2, 3)
    model = torch.nn.GRU(2, 3)
    optimizer = gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, engine="mine_alone:Mine")
    assert type(optimizer.engine).__name__ == "Mine"
    for name, error in (
        ("mine_alone:other", TypeError),
        ("mine_alone:Nobody", ImportError),
        ("no_such:X", ImportError),
    ):
        with pytest.raises(error, match=name):
            gradfree.create_engine(name)


@pytest.fixture
def noted(monkeypatch):
    """Remove registered engines after each test."""
    monkeypatch.setattr("gradfree.registry._registered", {})


def written(name="Noted", module="notebook"):
    return type(name, (gradfree.algorithms.FixedPoint,), {"__module__": module})


def test_a_module_that_raises_is_not_taken_for_a_wrong_path(tmp_path, monkeypatch):
    (tmp_path / "raising.py").write_text("raise TypeError('two arguments')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match=r"'raising:X' cannot be imported, its module raises TypeError: two arguments"
    ):
        gradfree.create_engine("raising:X")


@pytest.mark.usefixtures("noted")
def test_a_registered_engine_has_a_name_everywhere():
    first, again = written(), written()
    gradfree.register_engine("noted", first)
    assert type(gradfree.create_engine("noted", iterations=3)) is first
    gradfree.register_engine("noted", again)
    assert "noted" in gradfree.list_engines()
    model = torch.nn.GRU(2, 3)
    optimizer = gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, engine="noted", iterations=2)
    assert type(optimizer.engine) is again
    with pytest.raises(ValueError, match="'noted'"):
        gradfree.create_engine("notd")


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize(
    ("name", "engine", "error", "message"),
    [
        ("highway_bp", written(), ValueError, "'highway_bp' already"),
        ("noted", written("Other"), ValueError, "'noted' already"),
        ("my:engine", written(), ValueError, "'my:engine'"),
        (None, written(), ValueError, "None"),
        ("module", torch.nn.Identity, TypeError, "'module' must be a subclass of gradfree.Engine"),
        ("instance", HIGHWAY, TypeError, "'instance' must be a subclass of gradfree.Engine"),
    ],
)
def test_invalid_names_and_classes_cannot_be_registered(name, engine, error, message):
    gradfree.register_engine("noted", written())
    with pytest.raises(error, match=message):
        gradfree.register_engine(name, engine)
    assert "noted" in gradfree.list_engines()
    assert {"my:engine", "module", "instance"}.isdisjoint(gradfree.list_engines())


def test_dir_lists_only_public_names():
    rooms = {"algorithms", "benchmarks", "huggingface", "lightning", "models"}
    assert set(dir(gradfree)) == {*gradfree.__all__, "__version__", *rooms}


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="takes only options given by name"):
        type(HIGHWAY)(4)


def test_model_names_and_options():
    with pytest.raises(ValueError, match="no model is called 'resnet'; there are: gpt, lenet, mlp, orthogonal_convnet"):
        gradfree.create_model("resnet")
    with pytest.raises(
        TypeError, match="got an unexpected keyword argument 'layers'; its options are: depth, in_channels"
    ):
        gradfree.create_model("preact_resnet", layers=3)
    with pytest.raises(TypeError, match="gpt: missing a required argument: 'vocab_size'; its options are: vocab_size"):
        gradfree.create_model("gpt")


@pytest.fixture
def others(tmp_path, monkeypatch):
    """Install a package with one right engine and several wrong entries during the test."""
    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[gradfree.engines]\n"
        "right = gradfree.algorithms:FixedPoint\n"
        "dsf = gradfree_others:DSF\n"
        "gone = no_such_module:Engine\n"
        "none = torch.nn:Identity\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gone", ImportError, "of the package other cannot be loaded from no_such_module:Eng"),
        ("none", TypeError, "the engine 'none' must be a subclass of gradfree.Engine, not <class 'torch.nn.modules"),
        ("dsf", ValueError, "'dsf' is the name of several engines: gradfree.algorithms.dsf:DSF, gradfree_others:DSF."),
    ],
)
def test_errors_in_other_packages_are_named(name, error, message):
    with pytest.raises(error) as caught:
        gradfree.create_engine(name)
    assert message in str(caught.value)


@pytest.mark.usefixtures("others")
def test_errors_in_other_packages_do_not_affect_other_engines(capsys):
    """Lists name the errors; refusals, which try all engines, skip these packages."""
    main(["engines"])
    err = capsys.readouterr().out
    assert "cannot be loaded from no_such_module" in err
    assert "truncated  " in err
    assert gradfree.create_engine("right") == gradfree.create_engine("fixed_point")
    with pytest.raises(gradfree.ChainError, match="cannot be attached to"):
        HIGHWAY.attach(torch.nn.Linear(2, 2))


def test_every_engine_can_be_imported_by_the_name_of_its_class():
    kinds = {engine_class(name).__name__ for name in gradfree.list_engines()}
    assert kinds == set(gradfree.algorithms.__all__), "export new engines in algorithms/__init__.py"
