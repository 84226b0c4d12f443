"""Sparse n-step approximation of real-time recurrent learning, n = 1."""

from __future__ import annotations

from dataclasses import dataclass

from gradfree.algebra.block_scan import Blocks
from gradfree.engines.online import UnitEngine
from gradfree.time.time_chain import TimeChain


@dataclass(frozen=True, kw_only=True)
class SnAp(UnitEngine):
    """SnAp-1: real-time recurrent learning that keeps the influence of a weight on its own unit only; K = diag F.

    Menick et al., "Practical real time recurrent learning with a sparse approximation", ICLR 2021, arXiv 2006.07232,
    section 3: of P_t = F_t P_{t-1} + ∂f_t/∂θ only those entries are kept that ∂f_t/∂θ has. For a
    dense cell that is P_t = diag(F_t) P_{t-1} + ∂f_t/∂θ, or δ_t = e_t + δ_{t+1} diag(F_{t+1}): one scan. The diagonal
    contains the path through W_hh from a unit to itself, which the gates' diagonal (``eprop``) leaves out. A unit of
    an LSTM has two numbers, h and c, and a block of four. For a cell of one's own the diagonal is taken from dense
    Jacobians, which costs H VJPs.

    Needs nothing but a recurrent layer; costs one scan a pass. In a stream P takes the memory of the weights for each
    sequence and part of the state, whatever the length.

    Args:
        stream: see :class:`~gradfree.engines.online.StreamEngine`.
    """

    def blocks(self, chain: TimeChain) -> Blocks:
        """Return the diagonal of each F_t, unit by unit."""
        return chain.unit_blocks(carried=False)
