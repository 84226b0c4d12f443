"""The lean form of recurrent layers: less memory, the same gradients."""

import pytest
import torch
from recurrent_tasks import LanguageModel
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.devices.costs import kept_gates_pay
from gradfree.testing.cases.models import plain_model

BATCH, LENGTH, WIDTH = 64, 12, 64


class Task:
    """A GRU of the size at which gates are kept, in training."""

    def __init__(self, layers=1):
        self.module = nn.GRU(WIDTH, WIDTH, num_layers=layers)
        self.x = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
        self.cotangent = torch.randn(LENGTH, BATCH, WIDTH)
        assert kept_gates_pay(self.x, WIDTH)

    def gradients(self):
        out = self.module(self.x)[0]
        return out, torch.autograd.grad(out, [self.x, *self.module.parameters()], self.cotangent)


def test_lean_keeps_nothing_of_the_forward_pass_but_the_states():
    task = Task()
    kept = {}
    for lean in (False, True):
        with gradfree.create_engine("dsf").attach(task.module, lean=lean):
            node = task.module(task.x)[0].grad_fn
            kept[lean] = sum(tensor.nbytes for tensor in node.saved_tensors)
    assert kept[False] - kept[True] == 4 * task.x.nbytes


def saved(module):
    """Return how many tensors a pass through ``module`` keeps."""
    out = module(torch.randn(LENGTH, BATCH, WIDTH))[0]
    return len(out.grad_fn.saved_tensors)


def test_an_optimizer_attaches_the_lean_form():
    module = nn.GRU(WIDTH, WIDTH)
    counts = []
    for lean in (False, True):
        optimizer = gradfree.EngineOptimizer(torch.optim.SGD(module.parameters()), module, "dsf", lean=lean)
        counts.append(saved(module))
        optimizer.detach()
    assert counts[0] - counts[1] == 3


def test_chains_in_depth_have_no_lean_form():
    engine, message = gradfree.create_engine("highway_bp"), "'blocks' is a chain in depth.*lean=True is for recurrent"
    model = plain_model()
    with pytest.raises(ChainError, match=message):
        engine.attach(model, lean=True)
    with pytest.raises(ChainError, match=message):
        gradfree.EngineOptimizer(torch.optim.SGD(model.parameters()), model, engine, lean=True)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_keep_nothing_anyway_may_be_attached_lean():
    models = [LanguageModel("lstm"), LanguageModel("rnn_tanh"), gradfree.CellLayer(nn.GRUCell(3, 4))]
    for model in models:
        gradfree.create_engine("backprop").attach(model, lean=True).detach()
