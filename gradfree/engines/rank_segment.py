"""One segment of a chain on each rank: exact inside, K across the borders, messages between adjacent ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor, plus, times
from gradfree.chains.chain import Chain, ChainGradients


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


class RankSegment:
    """This rank's links of a chain, solved together with those of the adjacent ranks.

    The iteration is that of :class:`~gradfree.engines.segmented.Segments` with one segment a rank: in a sweep all ranks
    compute the VJPs of their own links at the same time. The rank at distance d from the last one knows its last
    cotangent exactly after d sweeps. After d + 1 sweeps it has nothing new to send.

    Args:
        chain: this rank's links.
        direct: the direct cotangents of their states.
        neighbors: messages to and from the adjacent ranks.
    """

    def __init__(self, chain: Chain, direct: Any, neighbors: Neighbors):
        self._chain, self._direct, self._neighbors = chain, direct, neighbors
        self._from_end = neighbors.count - 1 - neighbors.position

    def exact_gradients(self) -> ChainGradients:
        """Return the exact gradients, rank after rank; a rank computes its gradients while those on its left run."""
        end = self._end()
        if self._neighbors.left_wants_cotangents:
            self._neighbors.send_left(self._vjp(end))
        return self._gradients(end)

    def iterated_gradients(self, factors: Sequence[Factor], sweeps: int) -> ChainGradients:
        """Return the gradients after ``sweeps`` sweeps.

        Args:
            factors: K of each link; that of the first link acts across the border to the left.
            sweeps: k, less than the number of borders.
        """
        end = self._end()
        self._send_left(self._approximate_vjp(end, factors))
        for sweep in range(1, min(sweeps, self._from_end + 1) + 1):
            # The VJP comes before the wait for the right rank, so that all ranks compute at the same time.
            leaving = self._vjp(end) if self._neighbors.left_wants_cotangents else None
            before, end = end, self._end() if sweep <= self._from_end else end
            change = _times_all(end - before, factors) if sweep <= self._from_end else None
            self._send_left(plus(leaving, change))
        return self._gradients(end)

    def _end(self) -> Tensor:
        """Return the cotangent of the last state: from the loss on the last rank, else from the rank on the right."""
        own: Tensor = self._direct[-1]
        return self._neighbors.receive_right() if self._from_end else own

    def _send_left(self, cotangent: Cotangent) -> None:
        if self._neighbors.left_wants_cotangents:
            self._neighbors.send_left(cotangent)

    def _approximate_vjp(self, end: Tensor, factors: Sequence[Factor]) -> Cotangent:
        """Return the cotangent of the first link's input, with K in place of the Jacobian of every link."""
        delta = self._chain.scan([*self._direct[:-1], end], factors)
        return times(delta[0], factors[0])

    def _vjp(self, end: Tensor) -> Cotangent:
        """Return the cotangent of the first link's input, exact for the cotangent ``end`` of the last state."""
        delta: Cotangent = end
        for i in reversed(range(len(self._chain))):
            (carried,) = self._chain.vjps([i], [delta])
            delta = carried if i == 0 else plus(self._direct[i - 1], carried)
        return delta

    def _gradients(self, end: Tensor) -> ChainGradients:
        return self._chain.backpropagate([*self._direct[:-1], end])


def _times_all(change: Cotangent, factors: Sequence[Factor]) -> Cotangent:
    for factor in reversed(factors):
        change = times(change, factor)
    return change
