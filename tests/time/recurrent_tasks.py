"""Torch's recurrent modules in tasks whose gradients are compared."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

CELLS = {
    "rnn_tanh": lambda *a, **k: nn.RNN(*a, **k),
    "rnn_relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "gru": lambda *a, **k: nn.GRU(*a, **k),
    "lstm": lambda *a, **k: nn.LSTM(*a, **k),
}
LAYOUTS = {
    "one layer": {},
    "no bias": {"options": {"bias": False}},
    "three layers, batch first, h0": {"options": {"num_layers": 3, "batch_first": True}, "h0": True},
    "bidirectional, h0": {"options": {"num_layers": 2, "bidirectional": True}, "h0": True},
    "packed": {"packed": True},
    "packed, bidirectional, batch first, h0": {
        "options": {"num_layers": 2, "bidirectional": True, "batch_first": True},
        "packed": True,
        "h0": True,
    },
    "no batch, h0": {"options": {"num_layers": 2, "bidirectional": True}, "batch": None, "h0": True},
    "a batch of one": {"batch": 1},
}
INPUT, HIDDEN = 3, 4


class Task:
    """A recurrent module with an input, and a loss on all its outputs and final states."""

    def __init__(self, cell, length, options=None, batch=5, packed=False, h0=False):
        options = options or {}
        self.module = CELLS[cell](INPUT, HIDDEN, **options)
        shape = (length,) if batch is None else (length, batch)
        self.x = torch.randn(*shape, INPUT)
        if options.get("batch_first") and batch is not None:
            self.x = self.x.transpose(0, 1).contiguous()
        self.x.requires_grad_()
        self.lengths = (
            torch.tensor([max(1, length - 2), length, 1, max(1, length // 2), length], device="cpu") if packed else None
        )
        layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        shape = (layers, HIDDEN) if batch is None else (layers, batch, HIDDEN)
        self.states = [torch.randn(shape, requires_grad=True) for _ in range(2 if cell == "lstm" else 1)] if h0 else []

    def run(self):
        """Return the outputs and the final states as a flat list."""
        x = self.x
        if self.lengths is not None:
            first = self.module.batch_first
            x = pack_padded_sequence(x, self.lengths, batch_first=first, enforce_sorted=False)
        hx = None if not self.states else tuple(self.states) if len(self.states) > 1 else self.states[0]
        out, final = self.module(x, hx)
        return [out if self.lengths is None else out.data, *(final if isinstance(final, tuple) else [final])]

    def gradients(self, weights=None):
        """Return the gradients of input, initial states and parameters for random weights of what run() returns."""
        outputs = self.run()
        weights = weights or [
            torch.randn(o.shape, generator=torch.Generator(self.x.device).manual_seed(1)) for o in outputs
        ]
        loss = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        return torch.autograd.grad(loss, [self.x, *self.states, *self.module.parameters()])

    def gradients_of(self, what):
        """Return the gradients of all outputs for h0 alone ("h0"), or of the final state alone for everything."""
        outputs, *_, final = self.run()
        if what == "h0":
            return torch.autograd.grad(outputs.sum(), self.states)
        return torch.autograd.grad(final.sum(), [self.x, *self.states, *self.module.parameters()])


class LanguageModel(nn.Module):
    """A user's model: embedding, recurrent module with dropout between its layers, head."""

    def __init__(self, cell="gru", dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(11, INPUT)
        self.rnn = CELLS[cell](INPUT, HIDDEN, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])
