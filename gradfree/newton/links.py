"""What a change of one state brings to all later ones, solved for all steps at once by K, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradfree.algebra.block_scan import Blocks, block_scan, transposed


@dataclass(frozen=True)
class UnitLinks:
    """K_t of all steps, unit by unit; see :data:`~gradfree.algebra.block_scan.Blocks`."""

    blocks: Blocks

    def clamped(self) -> UnitLinks:
        """Return them with nothing that grows from step to step, where K is a guess at F."""
        return UnitLinks([[None if k is None else k.clamp(-1, 1) for k in row] for row in self.blocks])

    def forward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Solve y_t = terms_t + K_t y_{t-1}, part by part of the state, (T, B, H) each."""
        return block_scan(terms, self.blocks)

    def backward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Solve y_t = terms_t + y_{t+1} K_{t+1}."""
        return block_scan(terms, transposed(self.blocks), reverse=True)
