"""Conversion of sequences (T, B, ·) into segments (S, C · B, ·), one batch, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor


def split_segments(x: Tensor, count: int) -> Tensor:
    """Return ``x`` (T, B, ...) in ``count`` segments, (⌈T / count⌉, count · B, ...), padded by repeating the last step.

    A view if B is 1 and no padding is needed.
    """
    steps = -(-len(x) // count)
    if missing := steps * count - len(x):
        x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
    return x.unflatten(0, (count, steps)).transpose(0, 1).flatten(1, 2)


def join_segments(segments: Tensor, count: int, length: int) -> Tensor:
    """Undo :func:`split_segments`; return the first ``length`` steps, (T, B, ...)."""
    return segments.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)[:length]


def segment_products(diagonal: Factor, count: int) -> Factor:
    """Return the product of a diagonal (T, B, H) over each of ``count`` segments, (C, B, H); a number as it is."""
    if not isinstance(diagonal, Tensor):
        return diagonal
    return split_segments(diagonal, count).prod(0).unflatten(0, (count, -1))
