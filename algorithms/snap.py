"""Sparse n-step approximation of real-time recurrent learning, n = 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradfree.algebra.block_scan import Blocks
from gradfree.chains.report import path_name
from gradfree.chains.site import Site
from gradfree.engines.online import UnitEngine
from gradfree.errors import ChainError
from gradfree.time.cell_site import CellLayerSite
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

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem for a cell with an output beside its state, whose units are not those of the state."""
        yield from super().problems_with(site)
        if isinstance(site, CellLayerSite) and site.has_extra_output:
            yield (
                f"{path_name(site.path)} has a cell that returns an output beside its state (output_size): SnAp pairs "
                "what belongs to one unit, and an output has others. Compute it from the layer's states, behind the "
                "layer, or use the engine 'rtrl'."
            )

    def blocks(self, chain: TimeChain) -> Blocks:
        """Return the diagonal of each F_t, unit by unit.

        Raises:
            ChainError: the parts of the state have several shapes, or more dimensions than (B, H).
        """
        shapes = sorted({tuple(part.shape[1:]) for part in chain.states})
        if len(shapes) > 1 or len(shapes[0]) > 2:
            raise ChainError(
                f"{path_name(chain.path)}: SnAp keeps numbers for each unit, so all parts of a state must have one "
                f"shape (samples, units), not {' and '.join(map(str, shapes))}. Use the engine 'rtrl' or 'uoro'."
            )
        return chain.unit_blocks(carried=False)
