"""A GRU on long sequences, trained by skorch's own loop."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch
from comparing import WHOLE, Case, Training, compare
from skorch import NeuralNetRegressor
from torch import Tensor, nn

import gradfree

LENGTH, BATCH = 2000, 4
LINE = 'create_engine("shooting").attach(net.module_)'
CASES = (Case("NeuralNetRegressor, GRU, 64 units, 2000 steps, batches of 4", LINE, 60),)


class Net(nn.Module):
    """The last output, through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each sequence."""
        return self.head(self.gru(x)[0][:, -1])


def prepare(with_line: bool, steps: int) -> Training:
    """Return a function that trains on noise."""
    x = torch.randn(BATCH * steps, LENGTH, 8)
    y = x[:, -20:, :1].mean(1)
    net = NeuralNetRegressor(Net, max_epochs=1, batch_size=BATCH, train_split=None, optimizer=torch.optim.Adam)
    net.set_params(lr=1e-3, verbose=0).initialize()
    if with_line:
        gradfree.create_engine("shooting").attach(net.module_)
    return partial(train_and_predict, net, x, y)


def train_and_predict(net: NeuralNetRegressor, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the seconds of one epoch, and of predictions of the same sequences."""
    start = perf_counter()
    net.partial_fit(x, y)
    trained = perf_counter()
    net.predict(x)
    return {WHOLE: trained - start, "prediction": perf_counter() - trained}


if __name__ == "__main__":
    compare("skorch", CASES, prepare)
