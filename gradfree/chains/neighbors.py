"""The interface by which an engine exchanges cotangents with adjacent ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradfree.algebra.cotangents import Cotangent


class Neighbors(Protocol):
    """One rank's messages to the adjacent ranks in one backward pass; ranks are in the order of the chain's blocks.

    Messages between two ranks arrive in the order in which they are sent. Sending does not wait for the receiver.
    """

    @property
    def position(self) -> int:
        """The index of this rank; rank 0 has the first blocks."""

    @property
    def count(self) -> int:
        """The number of ranks."""

    @property
    def left_wants_cotangents(self) -> bool:
        """Whether the rank on the left takes cotangents: not on the first rank, nor if nothing there is trained."""

    def send_left(self, cotangent: Cotangent) -> None:
        """Send a cotangent of this rank's first input, which is the last state of the rank on the left."""

    def receive_right(self) -> Tensor:
        """Return the cotangent of this rank's last state that the rank on the right has sent."""
