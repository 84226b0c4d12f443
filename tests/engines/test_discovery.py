"""Unsupported chains are refused before attaching, with the module path and the remedy."""

import re

import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Plain, plain_model

HIGHWAY = gradfree.create_engine("highway_bp")


def refused(engine, model, chains=None):
    """Return the problems of ``model``, which the report and ``attach()`` both name."""
    before = snapshot(model)
    report = engine.validate(model, chains)
    assert not report.ok
    with pytest.raises(ChainError) as error:
        engine.attach(model, chains)
    assert all(problem in str(error.value) and problem in str(report) for problem in report.problems)
    assert_unchanged(model, before)
    return "\n".join(report.problems)


def with_an_empty_container():
    model = plain_model()
    model.extra = nn.ModuleList()
    return model


def a_layer_in_two_places():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def two_rows():
    rows = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2))
    return nn.ModuleDict(dict(zip("ab", rows, strict=True)))


class Bare(nn.Module):
    """A model whose parts are attributes."""


def blocks_as_attributes():
    model = Bare()
    model.layer1, model.layer2, model.head = Branch(), Branch(), nn.Linear(3, 3)
    return model


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)


def blocks_beside_norms():
    model = blocks_as_attributes()
    model.norm1, model.norm2, model.norm3 = (Scale() for _ in range(3))
    return model


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def metrics_and_an_empty_container():
    model = layers_as_attributes()
    model.accuracy, model.recall, model.skip = Bare(), Bare(), nn.Sequential()
    return model


def layers_as_attributes():
    model = Bare()
    model.fc1, model.fc2 = nn.Linear(3, 3), nn.Linear(3, 3)
    return model


def parametrized_layers():
    return nn.ModuleList([nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)) for _ in range(2)])


NO_CHAIN = "is of class {}, but a chain for this engine is an nn.Sequential, nn.ModuleList or nn.Mod"
CASES = {
    "a path that does not exist": (plain_model, ["block"], "no module 'block'. Did you mean 'blocks'?"),
    "no container": (plain_model, ["stem"], "'stem' " + NO_CHAIN.format("Linear")),
    "no path at all": (plain_model, [], "an empty list, which names no chain"),
    "no list": (plain_model, "blocks", "chains must be a list of module paths, chains=['blocks'], not 'blocks'"),
    "modules": (plain_model, [[Plain()]], "chains must be a list of module paths, chains=['blocks'], not [[Plain("),
    "an empty container": (with_an_empty_container, ["extra"], "'extra' has no blocks"),
    "no chain": (lambda: nn.Linear(3, 3), None, "or name them in order: chains=[['block1', 'block2']]"),
    "what can be named": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
        None,
        "What can be named, chains=[...]: ['']",
    ),
    "blocks as attributes": (
        blocks_as_attributes,
        None,
        "in this order, name them: chains=[['layer1', 'layer2']]. What can be named, chains=[...]: ['layer1.inner', ",
    ),
    "blocks beside norms": (blocks_beside_norms, None, "name them: chains=[['layer1', 'layer2']]. What can be named"),
    "no blocks": (metrics_and_an_empty_container, None, "LSTM. Put its blocks into one, or name them in order"),
    "parametrized layers": (parametrized_layers, None, "What can be named, chains=[...]: ['']."),
    "overlapping": (lambda: nn.Sequential(nn.Sequential(Plain()), Plain()), ["", "0"], "the chains '' and '0' share a"),
}
OF_LAYERS = {
    "a recurrent layer": (lambda: nn.Sequential(nn.GRU(3, 3)), ["0"], "'0' " + NO_CHAIN.format("GRU")),
    "two rows": (two_rows, None, "2 modules look like chains: 'a', 'b'. Say which: chains="),
    "layers as attributes": (layers_as_attributes, None, "as modules: nn.Sequential(fc1, nn.ReLU(), fc2)"),
    "a layer that cannot be split": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)),
        None,
        "1 is a BatchNorm1d, which this engine cannot split",
    ),
    "a layer in two places": (a_layer_in_two_places, [""], "0 and 2 are the same module"),
}


@pytest.mark.parametrize("case", [*CASES, *OF_LAYERS])
def test_an_unsupported_chain_is_refused_with_path_and_remedy(case):
    make, chains, message = (CASES | OF_LAYERS)[case]
    engine = HIGHWAY if case in CASES else gradfree.create_engine("foton")
    assert message in refused(engine, make(), chains)


@pytest.mark.parametrize("engine", ["shooting", "rtrl"])
def test_an_engine_for_time_takes_no_list_of_blocks(engine):
    engine, model = gradfree.create_engine(engine), nn.ModuleDict({"a": Plain(), "b": Plain()})
    assert "['a', 'b'] is a list of blocks, but a chain for this engine is " in refused(engine, model, [["a", "b"]])
    assert refused(engine, model, ["a", "b"]).endswith("Possible chains: none.")


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.b1, self.b2 = Plain(), Plain()


def test_a_module_whose_blocks_have_names_is_refused_with_chains_that_can_be_named():
    model = nn.ModuleDict({"stem": nn.Linear(4, 4), "stage": Stage()})
    assert "chains=[['stage.b1', 'stage.b2']]" in refused(HIGHWAY, model, ["stage"])


def test_a_scripted_model_is_refused():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    assert "the model is scripted" in str(HIGHWAY.validate(scripted))


PROPOSED = {
    "blocks": (plain_model, ["highway_bp", "fixed_point", "truncated", "dsf", "deeppcr"]),
    "a gate": (
        lambda: nn.GRU(6, 6),
        ["shooting", "newton", "highway_bp", "fixed_point", "truncated", "dsf", "deeppcr", "backprop"],
    ),
    "no gate": (
        lambda: nn.RNN(6, 6),
        ["shooting", "newton", "fixed_point", "truncated", "dsf", "deeppcr", "backprop"],
    ),
    "nothing": (lambda: nn.Linear(6, 6), []),
}


@pytest.mark.parametrize("kind", PROPOSED)
def test_a_refusal_proposes_engines_that_accept_the_model_best_first(kind):
    make, expected = PROPOSED[kind]
    with pytest.raises(ChainError) as error:
        gradfree.create_engine("foton").attach(make())
    proposals = [line for line in str(error.value).splitlines() if "there are the engines" in line]
    assert re.findall(r"'([a-z]\w+)'", "".join(proposals).partition("engines")[2]) == expected
    for name in expected:
        model, x = make(), torch.randn(5, 6)
        with gradfree.create_engine(name).attach(model):
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()


def test_proposals_say_which_chains_an_engine_takes():
    model = nn.ModuleDict({"net": plain_model(), "rnn": nn.LSTM(3, 4)})
    of_rnn, of_both = gradfree.create_engine("foton").validate(model).notes
    assert of_rnn == "for 'rnn' there are the engines 'shooting', 'newton' and 'backprop'."
    assert of_both.startswith("for 'net.blocks', 'rnn' there are the engines 'highway_bp', ")


@pytest.mark.parametrize("model", [None, "model", nn.Linear])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, not a"):
        HIGHWAY.attach(model)


def test_a_wrong_value_of_batched_is_refused():
    with pytest.raises(ValueError, match="batched must be 'auto', True or False, not 'yes'"):
        HIGHWAY.attach(plain_model(), batched="yes")
