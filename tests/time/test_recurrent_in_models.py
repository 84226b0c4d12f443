"""Torch's own recurrent modules in a user's model: found, trained, copied, checkpointed and left as they were."""

import copy

import pytest
import torch
from oracles import assert_close
from recurrent_tasks import CELLS, HIDDEN, LanguageModel, Task
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree


def train(model, engine=None, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if engine is not None:
        optimizer = gradfree.EngineOptimizer(optimizer, model, engine)
    torch.manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(11, (4, 9))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    if engine is not None:
        optimizer.detach()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_unmodified_model_is_found_and_trains_as_with_bptt(cell, dropout):
    model = LanguageModel(cell, dropout)
    other = copy.deepcopy(model)
    engine = gradfree.create_engine("backprop")
    assert str(engine.validate(model)).startswith("chain 'rnn': ")
    for a, b in zip(train(other, engine), train(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_of_a_stack_of_blocks_with_recurrent_layers_the_layers_are_the_chains():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x):
            return x + self.out(self.rnn(x)[0])

    model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(7, 5, HIDDEN)
    engine = gradfree.create_engine("highway_bp", iterations=7)
    assert list(engine.validate(model).chains) == ["0.rnn", "1.rnn", "2.rnn"]
    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    for chains in (None, [""]):
        with engine.attach(model, chains):
            assert_close(torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters())), expected)


@pytest.mark.parametrize("name", gradfree.list_engines())
def test_every_engine_trains_every_parameter_and_is_linear_in_the_loss(name):
    model, engine = LanguageModel(), gradfree.create_engine(name)
    if not engine.validate(model).ok:
        pytest.skip("not for chains in time")
    tokens = torch.randint(11, (4, 9))
    grads = {}
    for scale in (1e-4, 1.0, 65536.0):
        with engine.attach(model):
            model.zero_grad()
            (scale * model(tokens).pow(2).sum()).backward()
        grads[scale] = torch.cat([p.grad.flatten() / scale for p in model.parameters()])
    assert grads[1.0].isfinite().all()
    for scale in (1e-4, 65536.0):
        torch.testing.assert_close(grads[scale], grads[1.0], rtol=1e-10, atol=1e-12)


def test_attach_and_detach_leave_no_trace_and_copies_are_independent():
    model, tokens = LanguageModel(), torch.randint(11, (4, 9))
    before, keys = set(vars(model.rnn)), list(model.state_dict())
    with gradfree.create_engine("truncated").attach(model):
        assert list(model.state_dict()) == keys
        expected = torch.autograd.grad(model(tokens).sum(), model.embedding.weight)
        other = copy.deepcopy(model)
        assert other.rnn.forward.__self__.module is other.rnn
        assert_close(torch.autograd.grad(other(tokens).sum(), other.embedding.weight), expected)
    assert set(vars(model.rnn)) == before


def test_weights_that_are_computed_are_computed_once_as_in_the_module_itself():
    """Spectral norm takes a step of power iteration each time its weight is read."""
    tasks = []
    for _ in range(2):
        torch.manual_seed(0)
        tasks.append(Task("gru", 5, options={"num_layers": 2}))
        nn.utils.parametrizations.spectral_norm(tasks[-1].module, "weight_hh_l1")
    task, other = tasks
    outputs, expected = task.run(), task.gradients()
    with gradfree.create_engine("backprop").attach(other.module):
        assert all(map(torch.equal, other.run(), outputs))
        assert_close(other.gradients(), expected)
    for name, buffer in task.module.named_buffers():
        assert torch.equal(buffer, other.module.get_buffer(name))


def test_inside_a_checkpoint():
    task = Task("gru", 5)
    expected = torch.autograd.grad(task.module(task.x)[0].pow(2).sum(), list(task.module.parameters()))
    with gradfree.create_engine("backprop").attach(task.module):
        out = checkpoint(lambda x: task.module(x)[0], task.x, use_reentrant=False)
        assert_close(torch.autograd.grad(out.pow(2).sum(), list(task.module.parameters())), expected)
