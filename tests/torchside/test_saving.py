"""A model that is saved while an engine is attached contains no engine."""

import copy
import pickle

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import Plain


def layers():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


ENGINES = {
    "container": (lambda: nn.Sequential(Plain(), Plain()), "highway_bp", {}),
    "nn.GRU": (lambda: nn.GRU(6, 6, num_layers=2), "highway_bp", {}),
    "nn.LSTM": (lambda: nn.Sequential(nn.LSTM(6, 6)), "truncated", {}),
    "temperature": (layers, "foton", {"temperature": 3.0}),
}


def run(model, x):
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


def test_a_pickled_model_has_no_engine_and_needs_no_gradfree(request):
    """Hooks and replaced forward methods are not pickled; all classes are torch's here."""
    models = {}
    for name, (make, engine, options) in ENGINES.items():
        model, x = make() if name != "container" else nn.Sequential(layers(), layers()), torch.randn(3, 4, 6)
        engine, chains = ("fixed_point", [""]) if name == "container" else (engine, None)
        expected = run(model, x).detach()
        gradfree.create_engine(engine, **options).attach(model, chains)
        models[name] = (model, x, expected)
        models[f"a copy of {name}"] = (copy.deepcopy(model), x, expected)
    written = pickle.dumps(models)
    request.getfixturevalue("without_gradfree")
    for name, (model, x, expected) in pickle.loads(written).items():
        assert torch.equal(run(model, x), expected), name
        for path, module in model.named_modules():
            hooks = [held for key, held in vars(module).items() if "hooks" in key and held]
            assert not hooks, (name, path, hooks)
            assert not {"forward", "__reduce_ex__"} & vars(module).keys(), (name, path)
            assert not any(vars(held) for held in vars(module).values() if type(held).__name__ == "OrderedDict"), path


def test_a_saved_cell_layer_has_no_engine():
    layer, x = gradfree.CellLayer(nn.GRUCell(6, 6)), torch.randn(3, 4, 6)
    with gradfree.create_engine("fixed_point").attach(layer):
        other = pickle.loads(pickle.dumps(layer))
        assert "unroll" in vars(layer)
        assert "unroll" in vars(copy.deepcopy(layer))
    assert not {"unroll", "__reduce_ex__", "__deepcopy__"} & (vars(other).keys() | vars(layer).keys())
    assert torch.equal(other(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", ENGINES)
def test_saving_leaves_the_live_model_as_it_is_and_keeps_the_users_own_hooks(name):
    """The engine stays on it and on deep copies; the user's hook is saved and can be removed afterwards."""
    make, engine, options = ENGINES[name]
    model, x = make(), torch.randn(3, 4, 6)
    inner = model[0] if isinstance(model, nn.Sequential) else model
    mine = inner.register_forward_hook(noticed)
    with gradfree.create_engine(engine, **options).attach(model):
        expected = torch.autograd.grad(run(model, x).sum(), list(model.parameters()), allow_unused=True)
        other = pickle.loads(pickle.dumps(model))
        for live in (model, copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
            actual = torch.autograd.grad(run(live, x).sum(), list(live.parameters()), allow_unused=True)
            assert all(map(torch.equal, actual, expected))
        mine.remove()
        assert noticed not in inner._forward_hooks.values()
    loaded = other[0] if isinstance(other, nn.Sequential) else other
    assert list(loaded._forward_hooks.values()) == [noticed]
    assert not inner._forward_hooks
    assert not vars(inner._forward_hooks)


def noticed(module, args, out):
    """A user's hook that changes nothing."""
