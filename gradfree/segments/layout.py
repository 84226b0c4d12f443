"""Sequences cut into segments that run side by side: (T, B, ·) as (S, C · B, ·), and back."""

from __future__ import annotations

import torch
from torch import Tensor


def cut(x: Tensor, count: int) -> Tensor:
    """Return ``x`` (T, B, ...) in ``count`` segments, (⌈T / count⌉, count · B, ...), the last step again behind it."""
    steps = -(-len(x) // count)
    if missing := steps * count - len(x):
        x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
    return x.unflatten(0, (count, steps)).transpose(0, 1).flatten(1, 2)


def joined(segments: Tensor, count: int, length: int) -> Tensor:
    """Undo :func:`cut`: return the first ``length`` steps, (T, B, ...), from (S, count · B, ...)."""
    return segments.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)[:length]
