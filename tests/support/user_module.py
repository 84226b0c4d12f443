"""A user's models, data and losses."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradfree import CellLayer, Engine


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, depth, outputs, width=8):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


def build(depth=4):
    return Model(depth, 3)


class Tuple(Model):
    def forward(self, x):
        return super().forward(x), x


def build_tuple():
    return Tuple(2, 3)


class Stateful(nn.Module):
    """Starts each batch from the state at the end of the previous one."""

    def __init__(self):
        super().__init__()
        self.rnn, self.state = nn.GRU(4, 3), None

    def forward(self, x):
        out, self.state = self.rnn(x[None], self.state)
        return out[0]


def build_stateful():
    return Stateful()


def build_regression():
    return Model(3, 1)


def inputs():
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def loader():
    x = inputs()
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=16)


def pair():
    x = inputs()
    return x, x[:, :3].argmax(1)


def named():
    x, y = pair()
    return {"train": (x[:20], y[:20]), "validation": TensorDataset(x[20:30], y[20:30]), "test": [(x[30:], y[30:])]}


def two():
    x, y = pair()
    return (x[:30], y[:30]), (x[30:], y[30:])


def spoilt():
    """Return forty training examples, three of them with NaN or infinite inputs."""
    x, y = pair()
    x[[1, 5], [0, 2]] = torch.nan
    x[7] = torch.inf
    return {"train": (x, y), "validation": (x[:4], y[:4]), "test": (x[:4], y[:4])}


def regression():
    x = inputs()
    return x, x.sum(1, keepdim=True)


def loss(outputs, targets):
    return (outputs - targets).abs().mean()


def class_loss(outputs, targets):
    return nn.functional.multi_margin_loss(outputs, targets)


def right(outputs, targets):
    """Return the share of right answers, as a number."""
    return (outputs.argmax(1) == targets).float().mean().item()


def bad_batches():
    return [{"x": 1}]


def unequal():
    x, y = pair()
    return x[:30], y


def leaving():
    sys.exit(0)


def broken():
    raise OSError("no such disk")


class Endless(Engine):
    """Never returns a gradient."""

    def gradients(self, chain, direct):
        while True:
            pass


def build_wide_cell():
    return CellLayer(nn.GRUCell(3, 9))
