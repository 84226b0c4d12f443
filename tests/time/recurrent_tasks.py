"""Tasks with torch's recurrent modules, to compare gradients."""

import torch
from torch import nn

CELLS = {
    "rnn_tanh": lambda *a, **k: nn.RNN(*a, **k),
    "rnn_relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "gru": lambda *a, **k: nn.GRU(*a, **k),
    "lstm": lambda *a, **k: nn.LSTM(*a, **k),
}
INPUT, HIDDEN = 3, 4


class Task:
    """A recurrent module, an input, and a loss on all outputs and final states."""

    def __init__(self, cell, length, num_layers=1):
        self.module = CELLS[cell](INPUT, HIDDEN, num_layers)
        self.x = torch.randn(length, 5, INPUT, requires_grad=True)

    def run(self):
        """Return the outputs and the final states as a flat list."""
        out, final = self.module(self.x)
        return [out, *(final if isinstance(final, tuple) else [final])]

    def gradients(self):
        """Return the gradients of input and parameters, for a loss that weights the results of ``run`` randomly."""
        generator = torch.Generator(self.x.device).manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in self.run())
        return torch.autograd.grad(loss, [self.x, *self.module.parameters()])


def everything(module, x, *states):
    """Return outputs, final states and gradients of a loss on all of them."""
    out, final = module(x, *states)
    parts = [out, *(final if isinstance(final, tuple) else [final])]
    loss = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in parts)
    return [*parts, *torch.autograd.grad(loss, [x, *states, *module.parameters()])]


def remembering(bias=8.0):
    """Return a GRU with long memory: its update gates are nearly 1."""
    gru = nn.GRU(3, 8)
    with torch.no_grad():
        gru.bias_ih_l0[8:16] = bias
    return gru


def chaotic():
    """Return a chaotic RNN: trajectories from different initial states diverge."""
    rnn = nn.RNN(3, 8)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(torch.randn(8, 8, generator=torch.Generator("cpu").manual_seed(1)) * 2)
    return rnn
