"""Cells that return an output beside their state, in a ``CellLayer``."""

import pytest
import torch
from oracles import off_by
from torch import nn

import gradfree
from gradfree import CellLayer


class Projecting(nn.Module):
    """An LSTM cell whose output is read from its state."""

    hidden_size, parts, output_size = 4, 2, 5

    def __init__(self):
        super().__init__()
        self.cell, self.read = nn.LSTMCell(3, 4), nn.Linear(4, 5)

    def forward(self, x, state):
        h, c = self.cell(x, state)
        return self.read(h).tanh() + state[0].sum(-1, keepdim=True), (h, c)


class Leaky(nn.Module):
    """One whose state is a single tensor."""

    hidden_size, output_size = 4, 2

    def __init__(self):
        super().__init__()
        self.network, self.read = nn.Linear(3 + 4, 4), nn.Linear(4, 2)

    def forward(self, x, state):
        state = 0.5 * state + torch.tanh(self.network(torch.cat([x, state], -1)))
        return self.read(state), state


def loop(layer, x, state):
    outs = []
    for step in x:
        out, state = layer.cell(step, state)
        outs.append(out)
    return torch.stack(outs), state


def everything(run, layer, x, state):
    out, final = run(layer, x, state)
    parts = final if isinstance(final, tuple) else (final,)
    found = [out, *parts]
    loss = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in found)
    states = state if isinstance(state, tuple) else (state,)
    return [*found, *torch.autograd.grad(loss, [x, *states, *layer.parameters()])]


def states(cell):
    made = [torch.randn(2, 4, requires_grad=True) for _ in range(getattr(cell, "parts", 1))]
    return tuple(made) if len(made) > 1 else made[0]


ENGINES = {
    "none": None,
    "backprop": {},
    "shooting": {"segments": 4, "burn": 4},
    "newton": {"max_sweeps": 30},
    "deeppcr": {},
    "fixed_point": {"iterations": 30},
    "truncated": {"window": 30},
    "dsf": {"feedback": 0.5, "iterations": 30},
}


@pytest.mark.filterwarnings("ignore:.*does not (forget|settle)")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cell", [Projecting, Leaky])
def test_a_layer_of_it_is_the_loop(engine, cell):
    layer, x = CellLayer(cell()), torch.randn(20, 2, 3, requires_grad=True)
    state = states(layer.cell)
    expected = everything(loop, layer, x, state)
    if ENGINES[engine] is None:
        assert off_by(everything(CellLayer.__call__, layer, x, state), expected) < 1e-12
        return
    with gradfree.create_engine(engine, **ENGINES[engine]).attach(layer):
        assert off_by(everything(CellLayer.__call__, layer, x, state), expected) < 1e-10


def test_an_approximate_engine_approximates_the_state_alone():
    """Without links from step to step each step's own gradient is left, whatever K."""
    layer, x = CellLayer(Leaky()), torch.randn(20, 2, 3)
    with torch.no_grad():
        layer.cell.network.weight[:, 3:] = 0.0
    grads = []
    for feedback in (0.0, 0.9):
        with gradfree.create_engine("dsf", feedback=feedback).attach(layer):
            out, _ = layer(x)
            grads.append(torch.autograd.grad(out.sum(), layer.cell.read.weight)[0])
    assert torch.equal(*grads)


def test_it_runs_with_resets():
    layer, x = CellLayer(Projecting()), torch.randn(20, 2, 3)
    resets = torch.rand(20, 2) < 0.2
    out, (h, c) = gradfree.run_with_resets(layer, x, None, resets)
    state, outs = (torch.zeros(2, 4), torch.zeros(2, 4)), []
    for step, reset in zip(x, resets, strict=True):
        y, state = layer.cell(step, tuple(part * ~reset[:, None] for part in state))
        outs.append(y)
    assert off_by([out, h, c], [torch.stack(outs), *state]) < 1e-12


class Undeclared(nn.Module):
    hidden_size = 4

    def forward(self, x, state):
        return x, state


class Wrong(nn.Module):
    hidden_size, output_size = 4, 4

    def forward(self, x, state):
        return state


@pytest.mark.parametrize(("cell", "message"), [(Undeclared, "set Undeclared.output_size"), (Wrong, r"\(out, state\)")])
def test_what_a_cell_does_not_say_is_asked_for(cell, message):
    with pytest.raises(ValueError, match=message):
        CellLayer(cell())(torch.randn(5, 2, 3))
