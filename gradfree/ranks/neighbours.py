"""The other ranks of one chain, as one of them sees them in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradfree.ranks.messages import Messages


class Neighbours:
    """Gives other ranks tensors of one pass and takes theirs.

    Args:
        messages: the ranks.
        device: where this rank's tensors are.
        number: of the pass, the same on all ranks.

    Attributes:
        position: of this rank, from 0.
        count: how many ranks there are.
    """

    def __init__(self, messages: Messages, device: torch.device, number: int = 0):
        self.messages, self.device, self.number = messages, device, number
        self.position, self.count = messages.position, messages.count

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank."""
        return self.position == self.count - 1

    def give(self, tensors: Sequence[Tensor], to: int, kind: int, what: str, extra: Any = None) -> None:
        """Send a rank tensors, and a note beside them."""
        self.messages.give(tensors, to, self.number, kind, what, extra)

    def take(self, source: int, kind: int, what: str) -> tuple[list[Tensor], Any]:
        """Return what a rank has given."""
        return self.messages.take(source, self.number, kind, what, self.device)
