"""The user's batches and losses are used unchanged."""

import pytest
import torch
import user_module
from torch import nn

from gradfree.benchmarks.advice.job import Job
from gradfree.cli import UsageError

MODEL, DATA = "user_module:build", "user_module:loader"


def job(data=DATA, model=MODEL, loss=None):
    return Job(model, data, loss, None, "cpu")


def test_batches_are_those_of_the_loader():
    assert [len(inputs) for inputs, _ in job().batches] == [16, 16, 8]
    assert [len(x) for x, _ in job("user_module:pair").batches] == [32, 8]
    assert torch.equal(job("user_module:two").batches[0][0], user_module.pair()[0][:30])
    assert torch.equal(job("user_module:named").batches[0][0], user_module.pair()[0][:20])


def test_inputs_and_targets_of_different_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(user_module, "pair", lambda: (torch.ones(4, 3), torch.ones(5)))
    with pytest.raises(UsageError, match=r"user_module:pair has inputs of shape \(4, 3\) and targets of shape \(5,\)"):
        _ = job("user_module:pair").batches


def test_the_default_loss_is_the_outputs_own_or_depends_on_the_targets(monkeypatch):
    x, y = user_module.pair()
    model = job().build()
    assert torch.equal(job().loss_of(model, (x, y)), nn.functional.cross_entropy(model(x), y))
    regression = job("user_module:regression", "user_module:build_regression", "user_module:loss")
    inputs, target = regression.batches[0]
    model = regression.build()
    assert torch.equal(regression.loss_of(model, (inputs, target)), (model(inputs) - target).abs().mean())

    model.forward = lambda x: {"loss": x.sum(), "logits": x}
    assert job().loss_of(model, {"x": x}) == job().loss_of(model, (x, y)) == x.sum()
