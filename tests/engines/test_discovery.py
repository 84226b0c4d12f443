"""What can be no chain is refused before anything is attached, with the module path and the remedy."""

import pytest
import torch
from oracles import assert_unchanged, snapshot
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Plain, plain_model

HIGHWAY = gradfree.create_engine("highway_bp")


def refused(engine, model, chains=None):
    """Return what the engine's report and its attach() both say against ``model``."""
    before = snapshot(model)
    report = engine.validate(model, chains)
    assert not report.ok
    with pytest.raises(ChainError) as error:
        engine.attach(model, chains)
    assert all(problem in str(error.value) and problem in str(report) for problem in report.problems)
    assert_unchanged(model, before)
    return "\n".join(report.problems)


def test_a_path_that_does_not_exist_is_met_with_the_nearest_one():
    assert "the model has no module 'block'. Did you mean 'blocks'?" in refused(HIGHWAY, plain_model(), ["block"])


def test_a_path_that_is_no_container():
    message = refused(HIGHWAY, plain_model(), ["stem"])
    assert "'stem' is of class Linear, but a chain for this engine is an nn.Sequential, nn.ModuleList or nn" in message
    assert "What can be one: ['blocks'], or a list of blocks: [['b1', 'b2']]" in message


def test_a_recurrent_layer_is_no_chain_for_an_engine_for_layers():
    message = refused(gradfree.create_engine("foton"), nn.Sequential(nn.GRU(3, 3)), ["0"])
    assert "'0' is of class GRU, but a chain for this engine is an nn.Sequential, nn.ModuleList or nn.Mod" in message


@pytest.mark.parametrize("chains", [[], "blocks", ["blocks", "blocks"]])
def test_chains_is_a_list_of_different_paths(chains):
    assert "chains" in refused(HIGHWAY, plain_model(), chains)


def test_modules_in_place_of_paths_are_called_by_their_paths():
    model = plain_model()
    assert "module paths, chains=['blocks'], not modules: this ModuleList is 'blocks'." in refused(
        HIGHWAY, model, [model.blocks]
    )
    assert "not modules: this Plain is 'blocks.0'." in refused(HIGHWAY, model, [list(model.blocks)])
    assert "not modules: this Plain is not the model's." in refused(HIGHWAY, model, [Plain()])


def test_an_empty_container():
    model = plain_model()
    model.extra = nn.ModuleList()
    assert "'extra' has no blocks" in refused(HIGHWAY, model, ["extra"])


def test_a_model_without_a_chain():
    assert "no chain that can be found without help" in refused(HIGHWAY, nn.Linear(3, 3))
    assert "chains=[['block1', 'block2']]" in refused(HIGHWAY, nn.Linear(3, 3))


def test_several_possible_chains_of_layers_are_ambiguous():
    rows = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
    message = refused(gradfree.create_engine("foton"), nn.ModuleDict({"a": rows[0], "b": rows[1]}))
    assert "2 modules look like chains: 'a', 'b'. Say which: chains=" in message


def test_overlapping_chains():
    inner = nn.Sequential(Plain(), Plain())
    model = nn.Sequential(inner, Plain())
    assert "the chains '' and '0' share a " in refused(HIGHWAY, model, ["", "0"])


def test_one_module_in_two_places():
    layer = nn.Linear(3, 3)
    message = refused(gradfree.create_engine("foton"), nn.Sequential(layer, nn.Tanh(), layer), [""])
    assert "0 and 2 are the same module" in message


def test_compiled_blocks_where_the_residual_path_must_be_seen():
    model = plain_model()
    compiled = torch.compile(model, backend="eager")
    assert "'' (the model itself) is compiled, which hides the residual path" in refused(HIGHWAY, compiled)
    model.blocks[1].compile(backend="eager")
    assert "'blocks.1' is compiled, which hides the residual path of the blocks in 'blocks'" in refused(HIGHWAY, model)
