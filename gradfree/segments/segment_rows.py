"""Where the steps of all segments lie in a sequence's own tensors, (T, B, ·), sequences first or steps first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SegmentRows:
    """All segments' states side by side, one a row.

    Attributes:
        count: C.
        batch_major: whether the segments of a sequence lie side by side, and not those of all sequences that begin
            at the same step. Where no step is left over the rows of one step are then those of a matrix.
    """

    count: int
    batch_major: bool

    def by_step(self, x: Tensor) -> Tensor:
        """Return a view of ``x`` (C · S, B, ·) step by step: (S, C · B, ·), or where that is none with B by itself.

        ``x`` lies as :meth:`in_layout` returns it.
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
        """Return ``x`` (T, B, ·) as a matrix of as many rows, in the order in which they lie."""
        return (x.transpose(0, 1) if self.batch_major else x).flatten(0, 1)

    def in_layout(self, x: Tensor) -> Tensor:
        """Return ``x`` (T, B, ·), copied if it does not lie as these rows do."""
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.batch_major else x.contiguous()

    def from_matrix(self, x: Tensor, length: int) -> Tensor:
        """Undo :meth:`to_matrix` for T = ``length``."""
        if self.batch_major:
            return x.unflatten(0, (-1, length)).transpose(0, 1)
        return x.unflatten(0, (length, -1))

    def empty(self, like: Tensor, width: int) -> Tensor:
        """Return an empty tensor for ``width`` numbers for every step and sequence of ``like`` (T, B, ·)."""
        length, batch = like.shape[:2]
        return self.from_matrix(torch.empty(length * batch, width, dtype=like.dtype, device=like.device), length)
