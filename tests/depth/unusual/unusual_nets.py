"""Blocks that a recorder may get wrong, and a net of four of them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH, SAMPLES = 4, 6, 3


class Residual(nn.Module):
    """x + tanh(Wx + b)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Given(Residual):
    """A block with a second input."""

    def forward(self, x, side):
        return x + torch.tanh(self.linear(x)) * side


class Closed(Residual):
    """A block that uses a tensor that is not its own."""

    def __init__(self):
        super().__init__()
        self.outside = []

    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * self.outside[0]


class InPlace(Residual):
    """Its ReLU overwrites its input state."""

    def forward(self, x):
        return super().forward(torch.relu_(x))


class Reentrant(Residual):
    """A block with a reentrant checkpoint."""

    def forward(self, x):
        return x + checkpoint(lambda h: torch.tanh(self.linear(h)), x, use_reentrant=True)


class Returning(Residual):
    """It also returns a tensor that is computed from its state."""

    def forward(self, x):
        h = super().forward(x)
        return h, torch.cos(h)


class Net(nn.Module):
    """Four blocks between two layers."""

    def __init__(self, block=Residual):
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(block() for _ in range(LENGTH))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def states(self, x, *sides):
        """Return h_0 to h_L."""
        states = [self.stem(x)]
        for i, block in enumerate(self.blocks):
            states.append(block(states[-1], *sides[i : i + 1]))
        return states

    def loss(self, h):
        """Return a loss with ``h`` as the last state."""
        return self.head(h).pow(2).sum()
