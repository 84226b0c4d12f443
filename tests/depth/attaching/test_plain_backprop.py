"""Backprop leaves chains in depth to autograd, and reports that."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import plain_model


def hooked(model):
    return [
        path for path, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)
    ]


@pytest.mark.parametrize("plain", [None, True])
@pytest.mark.parametrize("chains", [None, ["blocks"]])
def test_backprop_leaves_chains_in_depth_to_autograd(plain, chains):
    """Nothing is put on the model, so nothing is refused: here blocks with backward hooks, and a block used twice."""
    model = plain_model()
    model.blocks[1].register_full_backward_hook(lambda *_: None)
    model.blocks.append(model.blocks[0])
    engine = gradfree.create_engine("backprop", plain=plain)
    assert not engine.validate(model, chains).chains
    with nullcontext() if plain else pytest.warns(UserWarning, match="nothing is attached.*'blocks'"):
        handle = engine.attach(model, chains)
    with handle:
        assert not hooked(model)
        assert not handle.chains
    for other in (nn.Linear(3, 3), nn.ModuleList([plain_model(), plain_model()])):
        engine.attach(other).detach()


def test_a_baseline_that_is_named_does_not_warn_that_it_attaches_nothing():
    """As in Trainer(strategy="backprop"), over models of all kinds; the report says it."""
    model = plain_model()
    assert "nothing is attached" in str(gradfree.create_engine("backprop").validate(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, "backprop").detach()
    with pytest.warns(UserWarning, match="Auto: nothing is attached"):
        gradfree.EngineOptimizer(torch.optim.SGD(model.parameters(), 0.1), model, "auto").detach()


@pytest.mark.parametrize("make", [plain_model, lambda: nn.GRU(3, 4), lambda: gradfree.CellLayer(nn.GRUCell(3, 4))])
def test_backprop_is_refused_beside_another_engine(make):
    """With another engine on the model, autograd would not compute the gradients."""
    model, plain = nn.ModuleDict({"net": make()}), gradfree.create_engine("backprop", plain=True)
    with gradfree.create_engine("truncated", window=1).attach(model):
        report = plain.validate(model)
        assert "has an engine attached already: call detach()" in str(report)
        assert "nothing is attached" not in str(report)
        with pytest.raises(gradfree.ChainError, match="attached already"):
            plain.attach(model)
    assert plain.validate(model).ok


def test_backprop_takes_the_recurrent_layers_beside_a_chain_in_depth():
    model = nn.ModuleDict({"net": plain_model(), "rnn": nn.GRU(3, 4)})
    engine = gradfree.create_engine("backprop")
    for chains in (None, ["net.blocks", "rnn"]):
        assert str(engine.validate(model, chains)) == "chain 'rnn': GRU, 1 layer, in time"
        with engine.attach(model, chains):
            assert hooked(model) == ["rnn"]
    with gradfree.create_engine("backprop", plain=False).attach(model, ["net.blocks", "rnn"]) as handle:
        assert list(handle.chains) == ["net.blocks", "rnn"]
