"""Odd input to recurrent layers: what torch's own module does with it, an attached engine does too."""

import pytest
import torch
from recurrent_tasks import CELLS
from torch import nn

import gradfree
from gradfree import CellLayer, ChainError

INPUT, HIDDEN, LENGTH, BATCH = 3, 4, 5, 2
NAMES = ["backprop", "truncated", "fixed_point", "dsf"]


def engines():
    for name in NAMES:
        yield gradfree.create_engine(name)


def snapshot(module):
    return [p.detach().clone() for p in module.parameters()], [p.grad is None for p in module.parameters()]


def states(module, *shape):
    parts = [torch.randn(shape) for _ in range(2 if isinstance(module, nn.LSTM) else 1)]
    return tuple(parts) if len(parts) > 1 else parts[0]


BAD = {
    "no steps": lambda m: (torch.randn(0, BATCH, INPUT),),
    "too few dimensions": lambda m: (torch.randn(INPUT),),
    "too many dimensions": lambda m: (torch.randn(2, LENGTH, BATCH, INPUT),),
    "other features": lambda m: (torch.randn(LENGTH, BATCH, INPUT + 1),),
    "other dtype": lambda m: (torch.randn(LENGTH, BATCH, INPUT).float(),),
    "states of another batch": lambda m: (torch.randn(LENGTH, BATCH, INPUT), states(m, 1, BATCH + 1, HIDDEN)),
    "states without batch": lambda m: (torch.randn(LENGTH, BATCH, INPUT), states(m, 1, HIDDEN)),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("cell", CELLS)
def test_what_torch_refuses_is_refused_in_its_words_and_changes_nothing(cell, bad):
    module = CELLS[cell](INPUT, HIDDEN)
    arguments, before = BAD[bad](module), snapshot(module)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        module(*arguments)
    for engine in engines():
        with engine.attach(module) as handle:
            with pytest.raises(expected.type) as actual:
                module(*arguments)
            assert str(actual.value) == str(expected.value)
            assert handle.state_dict() == {}
    after = snapshot(module)
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1] == after[1]


def plus_in_place(out, x, module):
    out += x


def stepped(out, x, module):
    with torch.no_grad():
        next(module.parameters()).mul_(2)


@pytest.mark.parametrize("change", [plus_in_place, stepped])
@pytest.mark.parametrize("make", [lambda: nn.GRU(HIDDEN, HIDDEN), lambda: CellLayer(nn.GRUCell(HIDDEN, HIDDEN))])
def test_what_the_backward_pass_needs_must_not_be_changed_in_place(make, change):
    """Torch's own layers mind it in part, by the device; the layer and the remedy are named."""
    model, x = nn.ModuleDict({"rnn": make()}), torch.randn(LENGTH, BATCH, HIDDEN)
    for engine in engines():
        with engine.attach(model):
            out = model["rnn"](x)[0]
            loss = out.sum()
            change(out, x, model)
            with pytest.raises(ChainError, match=r"output of rnn.* were changed in place .* \(out = out \+ x"):
                loss.backward()
    assert all(p.grad is None for p in model.parameters())
