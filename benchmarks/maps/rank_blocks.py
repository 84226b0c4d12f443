"""Blocks that work, blocks that wait as for a device of their own, and steps through them on several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Working(nn.Module):
    """x + MLP(LN(x)), 256 wide, 512 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return x + self.branch(x)


class Wait(torch.autograd.Function):
    """Takes so many seconds forward, so many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """Wait."""
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        """Wait."""
        time.sleep(ctx.seconds)
        return cotangent, None, None


class Waiting(nn.Module):
    """x + a branch that waits: so many seconds a sample forward, for the cotangent of x, and for its weight's gradient.

    For that only where it is asked for, as in torch's layers.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        seconds = self.seconds * len(x)
        return x + Wait.apply(self.weight, 0.0, seconds) * Wait.apply(x, seconds, seconds)


def in_parts(model: Callable[[Tensor], Tensor], x: Tensor, microbatches: int = 1) -> float:
    """Take forward and backward passes, one for each part of a batch; return the seconds of the forward passes."""
    forward = 0.0
    for part in x.chunk(microbatches):
        start = time.perf_counter()
        loss = model(part).square().mean()
        forward += time.perf_counter() - start
        loss.backward()
    return forward
