"""One segment of a chain on each rank: exact inside, K across the borders, messages between adjacent ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor, plus, times, times_all
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


def rank_gradients(
    chain: Chain, direct: Any, neighbors: Neighbors, factors: Sequence[Factor] | None = None, sweeps: int = 0
) -> ChainGradients:
    """Return the gradients of this rank's links: the exact ones, rank after rank, or those after ``sweeps`` sweeps.

    The iteration is that of :class:`~gradfree.engines.segmented.Segments` with one segment a rank: in a sweep all ranks
    compute the VJPs of their own links at the same time. The rank at distance d from the last one knows its last
    cotangent exactly after d sweeps. After d + 1 sweeps it has nothing new to send.

    Args:
        chain: this rank's links.
        direct: the direct cotangents of their states.
        neighbors: messages to and from the adjacent ranks.
        factors: K of each link; that of the first link acts across the border to the left. ``None``: exact gradients.
        sweeps: k, less than the number of borders; 0 for exact gradients.
    """
    distance = neighbors.count - 1 - neighbors.position
    end: Tensor = neighbors.receive_right() if distance else direct[-1]
    if neighbors.left_wants_cotangents:
        neighbors.send_left(_vjp(chain, direct, end, factors))
    for sweep in range(1, min(sweeps, distance + 1) + 1):
        assert factors is not None
        # The VJP comes before the wait for the right rank, so that all ranks compute at the same time.
        leaving = _vjp(chain, direct, end) if neighbors.left_wants_cotangents else None
        change: Cotangent = None
        if sweep <= distance:
            before, end = end, neighbors.receive_right()
            change = times_all(end - before, factors)
        if neighbors.left_wants_cotangents:
            neighbors.send_left(plus(leaving, change))
    # The rank computes its gradients while those on its left run.
    return chain.backpropagate([*direct[:-1], end])


def _vjp(chain: Chain, direct: Any, end: Tensor, factors: Sequence[Factor] | None = None) -> Cotangent:
    """Return the cotangent of the first link's input for ``end``, that of the last state: exact, or with K for F."""
    if factors is not None:
        return times(chain.scan([*direct[:-1], end], factors)[0], factors[0])
    delta: Cotangent = end
    for i in reversed(range(len(chain))):
        (carried,) = chain.vjps([i], [delta])
        delta = carried if i == 0 else plus(direct[i - 1], carried)
    return delta
