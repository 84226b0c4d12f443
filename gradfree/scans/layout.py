"""Sequences (T, ...) as C segments of S steps, of which the last one may be shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """T steps in segments: all but the last have S steps, the last one has L.

    Attributes:
        length: T.
        count: C.
        steps: S.
    """

    length: int
    count: int
    steps: int

    @staticmethod
    def into(count: int, length: int) -> Cut:
        """Cut ``length`` steps into at most ``count`` segments."""
        steps = -(-length // count)
        return Cut(length, -(-length // steps), steps)

    @property
    def last(self) -> int:
        """L, from 1 to S."""
        return self.length - (self.count - 1) * self.steps

    def split(self, x: Tensor, pad: Tensor | None = None) -> Tensor:
        """Return ``x`` (T, ...) as a copy (S, C, ...), in which the segments of one step are adjacent in memory.

        Args:
            x: the sequence.
            pad: what follows the last step; ``None``: the last step again.
        """
        if missing := self.count * self.steps - self.length:
            pad = x[-1] if pad is None else pad
            x = torch.cat([x, pad.expand(missing, *x.shape[1:])])
        return x.unflatten(0, (self.count, self.steps)).transpose(0, 1).contiguous()

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return (T, ...) from pieces (n, C or C - 1, ...), one after the other along the steps of the segments."""
        full = [piece for piece in pieces if piece.shape[1] == self.count]
        whole = full[0] if len(full) == 1 else torch.cat(full)
        if len(full) == len(pieces):
            return whole.transpose(0, 1).flatten(0, 1)
        inner = torch.cat([whole[:, :-1], *pieces[len(full) :]]).transpose(0, 1).flatten(0, 1)
        return torch.cat([inner, whole[:, -1]])

    def undo_split(self, x: Tensor) -> Tensor:
        """Return (T, ...) from (S, C, ...)."""
        return x.transpose(0, 1).flatten(0, 1)[: self.length]
