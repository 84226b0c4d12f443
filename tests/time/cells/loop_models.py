"""Models that call cells in loops of their own, as people write them."""

import torch
from cell_tasks import CELLS, HIDDEN, INPUT
from torch import nn

BATCH = 5


def outputs_of(state):
    """Return what of a state is the output: its first part."""
    return state[0] if isinstance(state, tuple) else state


class Looped(nn.Module):
    """A cell with what models have around it; ``run`` is one of the loops below."""

    def __init__(self, cell, run, layers=1):
        super().__init__()
        make, self.widths = CELLS[cell]
        self.run = run
        self.cell = make()
        self.stem = nn.Linear(INPUT, INPUT)
        self.embedding = nn.Embedding(7, INPUT)
        self.attend = nn.Linear(HIDDEN, INPUT)
        self.upper = nn.GRUCell(HIDDEN, HIDDEN)
        self.start = nn.ParameterList([nn.Parameter(torch.randn(width)) for width in self.widths])
        self.top = nn.Linear(HIDDEN, INPUT)

    def initial(self):
        """Return a trained initial state."""
        parts = tuple(part.expand(BATCH, -1) for part in self.start)
        return parts if len(parts) > 1 else parts[0]

    def forward(self, x, steps=6):
        """Return the loss for ``x`` (T, B, I)."""
        return self.run(self, x[:steps])


def weighted(states):
    """Return a loss that looks at every state otherwise."""
    return sum((torch.sin(outputs_of(state)) * (t + 1)).sum() for t, state in enumerate(states))


def slices(model, x):
    """The inputs are parts of one tensor; every state is in the loss."""
    fed, state, states = torch.tanh(model.stem(x)), model.initial(), []
    for t in range(len(x)):
        state = model.cell(fed[t], state)
        states.append(state)
    return weighted(states)


def columns(model, x):
    """Batch first, unbound; the last state alone is in the loss, all its parts."""
    state = model.initial()
    for fed in model.stem(x).transpose(0, 1).contiguous().unbind(1):
        state = model.cell(fed, state)
    return sum(part.pow(2).sum() for part in (state if isinstance(state, tuple) else [state]))


def stem_inside(model, x):
    """Each step computes its own input, from leaves alone."""
    state, states = model.initial(), []
    for row in x:
        state = model.cell(torch.tanh(model.stem(row)) + model.embedding(torch.arange(BATCH)), state)
        states.append(state)
    return weighted(states)


def one_input(model, x):
    """All steps get the same tensor."""
    fed, state, states = model.stem(x[0]), model.initial(), []
    for _ in range(len(x)):
        state = model.cell(fed, state)
        states.append(state)
    return weighted(states)


def raw_inputs(model, x):
    """Nothing lies before the cell; some states are used, some twice."""
    state, states = model.initial(), []
    for row in x:
        state = model.cell(row, state)
        states.append(state)
    return weighted(states[::2]) + outputs_of(states[0]).pow(2).sum() + outputs_of(states[1]).exp().sum()


def masked(model, x):
    """Short sequences keep their last state: what is handed on is no output of the cell."""
    state, states = model.initial(), []
    for t, row in enumerate(model.stem(x)):
        new = model.cell(row, state)
        on = (torch.arange(BATCH) + 2 > t).unsqueeze(-1)
        if isinstance(new, tuple):
            state = tuple(torch.where(on, n, o) for n, o in zip(new, state, strict=True))
        else:
            state = torch.where(on, new, state)
        states.append(state)
    return weighted(states)


def truncated(model, x):
    """Truncated BPTT: the state is cut off every two steps."""
    state, states = model.initial(), []
    for t, row in enumerate(model.stem(x)):
        if t % 2 == 0:
            state = tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()
        state = model.cell(row, state)
        states.append(state)
    return weighted(states)


def two_sequences(model, x):
    """An encoder and a decoder of the same cell, and another pass over the sequence reversed."""
    fed, state, states = model.stem(x), model.initial(), []
    for row in fed:
        state = model.cell(row, state)
        states.append(state)
    for row in model.stem(x.flip(0) * 0.5):
        state = model.cell(row, state)
        states.append(state)
    other = model.initial()
    for row in fed.flip(0):
        other = model.cell(row, other)
        states.append(other)
    return weighted(states)


def attention(model, x):
    """A decoder whose inputs depend on its states."""
    memory, state, states = model.stem(x), model.initial(), []
    for row in memory:
        weights = torch.softmax((memory * model.attend(outputs_of(state))).sum(-1), 0)
        state = model.cell(row + (weights.unsqueeze(-1) * memory).sum(0), state)
        states.append(state)
    return weighted(states)


def own_output(model, x):
    """A generator that is fed its own outputs."""
    row, state, states = model.stem(x[0]), model.initial(), []
    for _ in range(len(x)):
        state = model.cell(row, state)
        row = model.top(outputs_of(state))
        states.append(state)
    return weighted(states)


def stacked(model, x):
    """Two cells in one loop, with dropout between them."""
    state, upper, states = model.initial(), torch.zeros(BATCH, HIDDEN), []
    for row in model.stem(x):
        state = model.cell(row, state)
        upper = model.upper(nn.functional.dropout(outputs_of(state), 0.3), upper)
        states.append(upper)
    return weighted(states) + outputs_of(state).pow(2).sum()


def residual(model, x):
    """The inputs are in the loss as well."""
    fed, state, total = torch.tanh(model.stem(x)), model.initial(), 0.0
    for t in range(len(x)):
        state = model.cell(fed[t], state)
        total = total + (outputs_of(state)[:, :INPUT] + fed[t]).pow(2).sum()
    return total


def branching(model, x):
    """Two continuations of one state."""
    fed, state = model.stem(x), model.initial()
    state = model.cell(fed[0], state)
    left = model.cell(fed[1], state)
    right = model.cell(fed[2], state)
    return weighted([state, left, right, model.cell(fed[3], left)])


def watched(model, x):
    """A hook on a state doubles its gradient."""
    state, states = model.initial(), []
    for t, row in enumerate(model.stem(x)):
        state = model.cell(row, state)
        if t == 2:
            outputs_of(state).register_hook(lambda g: g * 2)
        states.append(state)
    return weighted(states)


def without_gradients(model, x):
    """Some steps warm the state up without a graph."""
    state = model.initial()
    with torch.no_grad():
        for row in x[:2]:
            state = model.cell(model.stem(row), state)
    states = []
    for row in model.stem(x[2:]):
        state = model.cell(row, state)
        states.append(state)
    return weighted(states)


LOOPS = (
    *(slices, columns, stem_inside, one_input, raw_inputs, masked, truncated, two_sequences, attention, own_output),
    *(stacked, residual, branching, watched, without_gradients),
)
