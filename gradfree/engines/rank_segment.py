"""One segment a rank: exact inside, what the split carries across the borders, messages between neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor, plus, times
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.neighbors import Neighbors


class RankSegment:
    """This rank's run of a chain's links, solved together with the runs of the ranks beside it.

    The same iteration as :class:`~gradfree.engines.segmented.Segments`, of which every rank has one: all ranks pull at
    once through their own links. The rank that is d from the end knows its last cotangent exactly after d sweeps, and
    sends on nothing new after d + 1.

    Args:
        chain: the links.
        direct: the direct cotangents of their states.
        neighbors: the ranks beside this one.
    """

    def __init__(self, chain: Chain, direct: Any, neighbors: Neighbors):
        self._chain, self._direct, self._neighbors = chain, direct, neighbors
        self._from_end = neighbors.count - 1 - neighbors.position

    def exact_gradients(self) -> ChainGradients:
        """Return the exact gradients: rank after rank, but each makes its parameters' while those on its left go on."""
        end = self._end()
        if self._neighbors.left_wants_cotangents:
            self._neighbors.send_left(self._pulled(end))
        return self._gradients(end)

    def iterated_gradients(self, factors: Sequence[Factor], sweeps: int) -> ChainGradients:
        """Return the gradients after some sweeps.

        Args:
            factors: K of each link, the first one's included, which carries across the border.
            sweeps: k, less than there are borders.
        """
        end = self._end()
        self._send_left(self._carried(end, factors))
        for sweep in range(1, min(sweeps, self._from_end + 1) + 1):
            # In this order: all ranks pull at once.
            leaving = self._pulled(end) if self._neighbors.left_wants_cotangents else None
            before, end = end, self._end() if sweep <= self._from_end else end
            change = _times_all(end - before, factors) if sweep <= self._from_end else None
            self._send_left(plus(leaving, change))
        return self._gradients(end)

    def _end(self) -> Tensor:
        """Return the cotangent of the last state, which the loss gives on the last rank only."""
        own: Tensor = self._direct[-1]
        return self._neighbors.receive_right() if self._from_end else own

    def _send_left(self, cotangent: Cotangent) -> None:
        if self._neighbors.left_wants_cotangents:
            self._neighbors.send_left(cotangent)

    def _carried(self, end: Tensor, factors: Sequence[Factor]) -> Cotangent:
        """Return what K alone makes of the cotangent at the end, and of the direct ones, before the first link."""
        delta = self._chain.scan([*self._direct[:-1], end], factors)
        return times(delta[0], factors[0])

    def _pulled(self, end: Tensor) -> Cotangent:
        """Return what the links make of them."""
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
