"""Cells whose units see each other through the input alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.algebra.block_scan import Blocks


class ElementwiseCell(nn.Module, ABC):
    """A cell that computes the next state unit by unit: its Jacobian F_t is diagonal, or a small block for each unit.

    Whatever mixes units lies in :meth:`fed`, which no state enters. So Newton's method takes few sweeps, each of them
    elementwise, and the cotangents one scan.

    Attributes:
        hidden_size: H, the number of units.
        parts: the number of tensors (B, H) that a state consists of, 1 if not said otherwise.
    """

    hidden_size: int
    parts: int = 1

    @abstractmethod
    def fed(self, x: Tensor) -> Tensor:
        """Return what the input brings to the units, (..., F), for ``x`` (..., I), of one step or of many."""

    @abstractmethod
    def advance(self, fed: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the next state, unit by unit.

        Args:
            fed: as of :meth:`fed`, (..., F).
            state: its parts, (..., H) each.
        """

    def forward(self, x: Tensor, state: Any) -> Any:
        """Return the next state, a tensor (B, H) or a tuple of several, for ``x`` (B, I) and the state before."""
        after = self.advance(self.fed(x), state if isinstance(state, tuple) else (state,))
        return after if self.parts > 1 else after[0]


def unit_blocks(after: Sequence[Tensor], before: Sequence[Tensor]) -> Blocks:
    """Return ∂after_i/∂before_j unit by unit, of tensors that autograd knows to be elementwise functions.

    Args:
        after: the parts of states, (T, B, H); their graphs are kept.
        before: of the states before.
    """
    return [
        torch.autograd.grad(part, before, torch.ones_like(part), retain_graph=True, allow_unused=True)
        if part.requires_grad
        else [None] * len(before)
        for part in after
    ]
