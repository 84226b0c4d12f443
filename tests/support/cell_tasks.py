"""Recurrent cells, torch's and users', in tasks whose gradients are compared."""

import pytest
import torch
from oracles import Halving
from torch import nn

from gradfree import CellLayer, ChainError
from gradfree.models.para_rnn import ParaGRUCell, ParaLSTMCell

INPUT, HIDDEN = 3, 4


class Leaky(nn.Module):
    """A user's cell with one state: leaky integration of a small network."""

    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(INPUT + HIDDEN, HIDDEN)
        self.leak = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x, state):
        return self.leak * state + torch.tanh(self.network(torch.cat([x, state], -1)))


class Writing(Leaky):
    """A user's cell whose state is the output of a function that changes its cotangent in place."""

    def forward(self, x, state):
        return Halving.apply(super().forward(x, state))


class TwoParts(Leaky):
    """A user's cell whose state has two parts of different width."""

    def forward(self, x, state):
        h, slow = state
        h = super().forward(x, h) + slow.mean(-1, keepdim=True)
        return h, 0.5 * slow + 0.5 * h[:, :2]


class Projecting(nn.Module):
    """An LSTM cell with an output computed from its state."""

    hidden_size, parts, output_size = HIDDEN, 2, 5

    def __init__(self):
        super().__init__()
        self.cell, self.read = nn.LSTMCell(INPUT, HIDDEN), nn.Linear(HIDDEN, 5)

    def forward(self, x, state):
        h, c = self.cell(x, state)
        return self.read(h).tanh() + state[0].sum(-1, keepdim=True), (h, c)


class Reading(Leaky):
    """A cell with one state and an output that is not its state."""

    output_size = 2

    def forward(self, x, state):
        state = super().forward(x, state)
        return state[:, :2].sin() * x[:, :1], state


CELLS = {
    "leaky": (Leaky, [HIDDEN]),
    "writing to its cotangent": (Writing, [HIDDEN]),
    "two parts": (TwoParts, [HIDDEN, 2]),
    "projecting": (Projecting, [HIDDEN, HIDDEN]),
    "reading": (Reading, [HIDDEN]),
    "rnn_tanh cell": (lambda: nn.RNNCell(INPUT, HIDDEN), [HIDDEN]),
    "gru cell": (lambda: nn.GRUCell(INPUT, HIDDEN), [HIDDEN]),
    "lstm cell": (lambda: nn.LSTMCell(INPUT, HIDDEN), [HIDDEN, HIDDEN]),
    "para_gru": (lambda: ParaGRUCell(INPUT, HIDDEN, 0.5), [HIDDEN]),
    "para_lstm": (lambda: ParaLSTMCell(INPUT, HIDDEN, 0.5), [HIDDEN, HIDDEN]),
}


class Task:
    """A layer with an input, an initial state, and a loss on all outputs."""

    def __init__(self, cell, length):
        make, widths = CELLS[cell]
        self.layer = CellLayer(make())
        self.x = torch.randn(length, 5, INPUT, requires_grad=True)
        parts = tuple(torch.randn(5, width, requires_grad=True) for width in widths)
        self.state = parts if len(parts) > 1 else parts[0]

    def run(self):
        out, final = self.layer(self.x, self.state)
        return [out, *(final if isinstance(final, tuple) else [final])]

    def gradients(self):
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in self.run())
        state = self.state if isinstance(self.state, tuple) else [self.state]
        return torch.autograd.grad(loss, [self.x, *state, *self.layer.parameters()])


def refusal(call):
    with pytest.raises((ChainError, ValueError)) as error:
        call()
    return str(error.value)
