"""What an engine may ask of the other ranks that a chain's runs of blocks lie on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradfree.algebra.cotangents import Cotangent


class Neighbors(Protocol):
    """The ranks of one chain, in the order of its blocks, as one of them sees them in one backward pass.

    Messages between two ranks arrive in the order in which they are sent. What is sent is not waited for.
    """

    @property
    def position(self) -> int:
        """The place of this rank, from 0, which has the first blocks."""

    @property
    def count(self) -> int:
        """How many ranks there are."""

    @property
    def left_wants_cotangents(self) -> bool:
        """Whether the rank on the left takes cotangents: never on the first, nor where nothing there is trained."""

    def send_left(self, cotangent: Cotangent) -> None:
        """Send the rank on the left a cotangent of its last state, which this rank's first link was given."""

    def receive_right(self) -> Tensor:
        """Return what the rank on the right has sent: a cotangent of this rank's last state."""
