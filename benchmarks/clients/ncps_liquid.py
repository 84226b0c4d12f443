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
COMPILED = LINE.replace("h, x)", "h, x, compile=True)")
LONG = {"kind": CfC, "units": 64, "batch": 1, "length": 2048}
BATCH = {"kind": CfC, "units": 64, "batch": 16, "length": 512}
CASES = (
    Case("CfC, 64 units, one sequence of 2048 steps", LINE, 60, LONG),
    Case("CfC, 64 units, 16 sequences of 512 steps", LINE, 60, BATCH),
    Case("LTC, 32 units, one sequence of 512 steps", LINE, 40, {"kind": LTC, "units": 32, "batch": 1, "length": 512}),
    Case("CfC, 64 units, one sequence of 2048 steps, after compilation", COMPILED, 60, {**LONG, "compile": True}),
    Case("CfC, 64 units, 16 sequences of 512 steps, after compilation", COMPILED, 60, {**BATCH, "compile": True}),
)
_TRIED = 40
"""In how many passes ``scan`` compiles and finds how it is fastest, before the training."""


def outputs(layer: Any, x: Tensor, with_line: bool, compile: bool) -> Tensor:
    """Return the outputs of all steps, (T, B, H), by the layer's own loop or by ``scan``."""
    if not with_line:
        return layer(x)[0]
    start = x.new_zeros(x.shape[1], layer.state_size)
    return gradfree.scan(lambda h, x: layer.rnn_cell(x, h, 1.0)[::-1], start, x, compile=compile)[1]


def train(layer: nn.Module, run: Callable[[Tensor], Tensor], batches: Tensor, rate: float) -> None:
    """Train the layer to return the running mean of its input."""
    optimizer = torch.optim.Adam(layer.parameters(), rate)
    for x in batches:
        target = x.mean(-1, keepdim=True).cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None]
        loss = nn.functional.mse_loss(run(x), target.expand(-1, -1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def prepare(
    with_line: bool, steps: int, kind: Any, units: int, batch: int, length: int, compile: bool = False
) -> Training:
    """Return a function that trains on noise, after the passes in which ``scan`` compiles and times its ways."""
    layer = kind(8, units, batch_first=False)
    batches = torch.randn(steps, length, batch, 8)
    for _ in range(_TRIED if with_line and compile else 0):
        outputs(layer, batches[0], with_line, compile).sum().backward()
    layer.zero_grad(set_to_none=True)
    return lambda: train(layer, lambda x: outputs(layer, x, with_line, compile).mean(-1, keepdim=True), batches, 1e-3)


if __name__ == "__main__":
    compare("ncps", CASES, prepare)
