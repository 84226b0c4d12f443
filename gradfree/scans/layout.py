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

    def split(self, x: Tensor) -> Tensor:
        """Return ``x`` (T, ...) as (C, S, ...); the missing steps of the last segment repeat the last one."""
        if missing := self.count * self.steps - self.length:
            x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
        return x.unflatten(0, (self.count, self.steps))

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return (T, ...) from pieces (C or C - 1, n, ...), one after the other along the steps of the segments."""
        full = [piece for piece in pieces if len(piece) == self.count]
        whole = full[0] if len(full) == 1 else torch.cat(full, 1)
        if len(full) == len(pieces):
            return whole.flatten(0, 1)
        inner = torch.cat([whole[:-1], *pieces[len(full) :]], 1).flatten(0, 1)
        return torch.cat([inner, whole[-1]])
