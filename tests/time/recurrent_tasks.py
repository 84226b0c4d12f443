"""Torch's recurrent modules in tasks whose gradients are compared."""

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
    """A recurrent module with an input, and a loss on all its outputs and final states."""

    def __init__(self, cell, length, num_layers=1):
        self.module = CELLS[cell](INPUT, HIDDEN, num_layers)
        self.x = torch.randn(length, 5, INPUT, requires_grad=True)

    def run(self):
        """Return the outputs and the final states as a flat list."""
        out, final = self.module(self.x)
        return [out, *(final if isinstance(final, tuple) else [final])]

    def gradients(self):
        """Return the gradients of input and parameters for random weights of what run() returns."""
        generator = torch.Generator(self.x.device).manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=generator)).sum() for o in self.run())
        return torch.autograd.grad(loss, [self.x, *self.module.parameters()])
