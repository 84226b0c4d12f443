"""Conversion of sequences (T, B, ·) into segments (S, C · B, ·), one batch, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def split_segments(x: Tensor, count: int) -> Tensor:
    """Return ``x`` (T, B, ...) in ``count`` segments, (⌈T / count⌉, count, B, ...), padded by repeating the last step.

    Without the dimension B if B is 1. A view if no padding is needed.
    """
    steps = -(-len(x) // count)
    if missing := steps * count - len(x):
        x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
    found = x.unflatten(0, (count, steps)).transpose(0, 1)
    return found.squeeze(2) if x.shape[1] == 1 else found


def split_into_rows(x: Tensor, count: int) -> Tensor:
    """Return :func:`split_segments` with segments and sequences in one dimension, (⌈T / count⌉, count · B, ...)."""
    found = split_segments(x, count)
    return found if x.shape[1] == 1 else found.flatten(1, 2)


def join_segments(segments: Tensor, count: int, length: int) -> Tensor:
    """Undo :func:`split_segments` and :func:`split_into_rows`; return the first ``length`` steps, (T, B, ...)."""
    whole = segments if segments.dim() == 4 else segments.unflatten(1, (count, -1))
    return whole.transpose(0, 1).flatten(0, 1)[:length]
