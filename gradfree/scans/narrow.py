"""Carries of a few numbers a row: their parts side by side, (T, R, n)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDEST_ROW = 8
"""The most numbers a row: each sweep takes as many VJPs, and the square of it a step in memory."""


@dataclass(frozen=True)
class Rows:
    """How the parts of a carry are split into rows, by their first dimensions.

    Attributes:
        shapes: of the parts, of real numbers.
        count: R, the number of rows.
    """

    shapes: tuple[torch.Size, ...]
    count: int

    @staticmethod
    def candidates(carry: Sequence[Tensor]) -> Iterator[Rows]:
        """Yield how ``carry`` can be split into rows of at most :data:`WIDEST_ROW` numbers, the narrowest first."""
        shapes = tuple(torch.Size((*part.shape, 2)) if part.is_complex() else part.shape for part in carry)
        common = 0
        while all(part.dim() > common and part.shape[common] == shapes[0][common] for part in carry):
            common += 1
        if not sum(shape.numel() for shape in shapes):
            return
        for dims in range(common, -1, -1):
            rows = Rows(shapes, shapes[0][:dims].numel())
            if rows.width <= WIDEST_ROW:
                yield rows

    @property
    def widths(self) -> list[int]:
        """How many numbers a row has of each part."""
        return [shape.numel() // self.count for shape in self.shapes]

    @property
    def width(self) -> int:
        """N."""
        return sum(self.widths)

    def of(self, chosen: Sequence[int]) -> Rows:
        """Return the rows of some of the parts."""
        return Rows(tuple(self.shapes[n] for n in chosen), self.count)

    def places(self, chosen: Sequence[int]) -> list[int]:
        """Return the places of some of the parts in a row."""
        ends = [0]
        for width in self.widths:
            ends.append(ends[-1] + width)
        return [place for n in chosen for place in range(ends[n], ends[n + 1])]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return (T, R, n) from parts (T, ...)."""
        flat = [part.reshape(len(part), self.count, -1) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)

    def split(self, joined: Tensor) -> list[Tensor]:
        """Undo :meth:`join`; all parts have the dtype of ``joined``."""
        pieces = joined.split(self.widths, -1)
        return [piece.reshape(len(piece), *shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
