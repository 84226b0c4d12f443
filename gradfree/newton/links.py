"""What a change of one state brings to all later ones, solved for all steps at once: K unit by unit, or all of F."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradfree.algebra.block_scan import Blocks, block_scan, transposed
from gradfree.algebra.cyclic_reduction import cyclic_reduction


class LinkSolver(Protocol):
    """K_t of all steps."""

    def forward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Solve y_t = terms_t + K_t y_{t-1}, part by part of the state, (T, B, H) each."""

    def backward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Solve y_t = terms_t + y_{t+1} K_{t+1}."""


@dataclass(frozen=True)
class UnitLinks:
    """K unit by unit; see :data:`~gradfree.algebra.block_scan.Blocks`."""

    blocks: Blocks

    def clamped(self) -> UnitLinks:
        """Return them with nothing that grows from step to step, where K is a guess at F."""
        return UnitLinks([[None if k is None else k.clamp(-1, 1) for k in row] for row in self.blocks])

    def forward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Scan from the first step to the last."""
        return block_scan(terms, self.blocks)

    def backward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Scan from the last step to the first."""
        return block_scan(terms, transposed(self.blocks), reverse=True)


@dataclass(frozen=True)
class DenseLinks:
    """All of F_2 to F_T, (T - 1, B, H, H), the parts of a state side by side."""

    matrices: Tensor

    def forward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Reduce from the first step to the last."""
        return self._solve([part.flip(0) for part in terms], self.matrices.flip(0).mT, back=True)

    def backward(self, terms: Sequence[Tensor]) -> Sequence[Tensor]:
        """Reduce from the last step to the first."""
        return self._solve(terms, self.matrices, back=False)

    def _solve(self, terms: Sequence[Tensor], matrices: Tensor, back: bool) -> Sequence[Tensor]:
        found = cyclic_reduction(torch.cat(list(terms), -1).to(matrices.dtype), matrices)
        parts = (found.flip(0) if back else found).split([part.shape[-1] for part in terms], -1)
        return [part.to(like.dtype) for part, like in zip(parts, terms, strict=True)]
