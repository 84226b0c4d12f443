"""Sequences cut into segments that run side by side: (T, B, ·) as (S, C · B, ·), and back."""

from __future__ import annotations

import torch
from torch import Tensor


def split_segments(x: Tensor, count: int) -> Tensor:
    """Return ``x`` (T, B, ...) in ``count`` segments, (⌈T / count⌉, count, B, ...), the last step again behind it.

    Without B if that is 1. A view where no step is missing.
    """
    steps = -(-len(x) // count)
    if missing := steps * count - len(x):
        x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
    found = x.unflatten(0, (count, steps)).transpose(0, 1)
    return found.squeeze(2) if x.shape[1] == 1 else found


def split_into_rows(x: Tensor, count: int) -> Tensor:
    """Return the same with segments and sequences in one dimension, (⌈T / count⌉, count · B, ...)."""
    found = split_segments(x, count)
    return found if x.shape[1] == 1 else found.flatten(1, 2)


def join_segments(segments: Tensor, count: int, length: int) -> Tensor:
    """Undo both: return the first ``length`` steps, (T, B, ...)."""
    whole = segments if segments.dim() == 4 else segments.unflatten(1, (count, -1))
    return whole.transpose(0, 1).flatten(0, 1)[:length]
