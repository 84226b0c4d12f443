"""Sequences (T, B, ·) as segments: in copies, one batch (S, C · B, ·) of them, or in views of the same memory."""

from __future__ import annotations

from dataclasses import dataclass

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


def by_segment(segments: Tensor, count: int) -> Tensor:
    """Return what :func:`split_segments` returns as a view (count, ⌈T / count⌉, B, ...)."""
    return segments.unflatten(1, (count, -1)).transpose(0, 1)


def join_segments(segments: Tensor, count: int, length: int) -> Tensor:
    """Undo :func:`split_segments`; return the first ``length`` steps, (T, B, ...)."""
    return by_segment(segments, count).flatten(0, 1)[:length]


def segment_products(diagonal: Factor, count: int) -> Factor:
    """Return the product of a diagonal (T, B, H) over each of ``count`` segments, (C, B, H); a number as it is."""
    if not isinstance(diagonal, Tensor):
        return diagonal
    return split_segments(diagonal, count).prod(0).unflatten(0, (count, -1))


@dataclass(frozen=True)
class SegmentRows:
    """Converts between (T, B, ·) tensors and rows, one row for the state of each segment of each sequence.

    Attributes:
        count: C, the number of segments.
        batch_major: whether tensors store sequence after sequence. The segments of one sequence are then adjacent
            rows, and if segments leave no remaining steps, the rows of one step are a matrix in memory.
    """

    count: int
    batch_major: bool

    def by_step(self, x: Tensor) -> Tensor:
        """Return ``x`` (C · S, B, ·) as a view by step, (S, C · B, ·); with separate C and B if that is not a view.

        ``x`` has the layout that :meth:`in_layout` returns.
        """
        parts = x.unflatten(0, (self.count, -1)).transpose(0, 1)
        parts = parts.transpose(1, 2) if self.batch_major else parts
        even = parts.stride(1) == parts.shape[2] * parts.stride(2) or 1 in parts.shape[1:3]
        return parts.flatten(1, 2) if even else parts

    def from_states(self, states: Tensor) -> Tensor:
        """Return states (C, B, H) as rows, (C · B, H)."""
        return (states.transpose(0, 1) if self.batch_major else states).flatten(0, 1)

    def to_states(self, rows: Tensor) -> Tensor:
        """Undo :meth:`from_states`."""
        if self.batch_major:
            return rows.unflatten(0, (-1, self.count)).transpose(0, 1)
        return rows.unflatten(0, (self.count, -1))

    def to_matrix(self, x: Tensor) -> Tensor:
        """Return ``x`` (T, B, ·) as a matrix of T · B rows in the order of memory."""
        return (x.transpose(0, 1) if self.batch_major else x).flatten(0, 1)

    def in_layout(self, x: Tensor) -> Tensor:
        """Return ``x`` (T, B, ·) in the memory layout of these rows; a copy if it has another layout."""
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.batch_major else x.contiguous()

    def from_matrix(self, x: Tensor, length: int) -> Tensor:
        """Undo :meth:`to_matrix` for T = ``length``."""
        if self.batch_major:
            return x.unflatten(0, (-1, length)).transpose(0, 1)
        return x.unflatten(0, (length, -1))

    def empty(self, like: Tensor, width: int) -> Tensor:
        """Return an uninitialised tensor (T, B, ``width``), with T and B of ``like`` (T, B, ·)."""
        length, batch = like.shape[:2]
        return self.from_matrix(torch.empty(length * batch, width, dtype=like.dtype, device=like.device), length)
