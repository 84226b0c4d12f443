"""Liquid networks of ncps: its own loop over time, and ``gradfree.scan`` over its own cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comparing import Case, Training, compare
from ncps.torch import LTC, CfC
from torch import Tensor, nn

import gradfree

LINE = "gradfree.scan(lambda h, x: layer.rnn_cell(x, h, 1.0)[::-1], h, x)"
CASES = (
    Case("CfC, 64 units, one sequence of 2048 steps", LINE, 60, {"kind": CfC, "units": 64, "batch": 1, "length": 2048}),
    Case("CfC, 64 units, 16 sequences of 512 steps", LINE, 60, {"kind": CfC, "units": 64, "batch": 16, "length": 512}),
    Case("LTC, 32 units, one sequence of 512 steps", LINE, 40, {"kind": LTC, "units": 32, "batch": 1, "length": 512}),
)


def outputs(layer: Any, x: Tensor, with_line: bool) -> Tensor:
    """Return the outputs of all steps, (T, B, H), by the layer's own loop or by ``scan``."""
    if not with_line:
        return layer(x)[0]
    start = x.new_zeros(x.shape[1], layer.state_size)
    return gradfree.scan(lambda h, x: layer.rnn_cell(x, h, 1.0)[::-1], start, x)[1]


def train(layer: nn.Module, run: Callable[[Tensor], Tensor], batches: Tensor, rate: float) -> None:
    """Train the layer to return the running mean of its input."""
    optimizer = torch.optim.Adam(layer.parameters(), rate)
    for x in batches:
        target = x.mean(-1, keepdim=True).cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None]
        loss = nn.functional.mse_loss(run(x), target.expand(-1, -1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepare(with_line: bool, steps: int, kind: Any, units: int, batch: int, length: int) -> Training:
    """Return a function that trains on noise."""
    layer = kind(8, units, batch_first=False)
    batches = torch.randn(steps, length, batch, 8)
    return lambda: train(layer, lambda x: outputs(layer, x, with_line).mean(-1, keepdim=True), batches, 1e-3)


if __name__ == "__main__":
    compare("ncps", CASES, prepare)
