"""Any recurrent cell as a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.algebra.block_scan import Blocks

Ends = Callable[[Tensor], Tensor]


class CellLayer(nn.Module):
    """Run a cell over a sequence; an engine finds the layer as a chain in time.

    Put ``nn.GRUCell``, ``nn.LSTMCell``, ``nn.RNNCell`` or a cell of your own in it, in place of the loop over steps.

    Args:
        cell: called as ``cell(x, state)`` with ``x`` (B, I); returns the next state, a tensor (B, H) or a tuple of
            them, the first of which is the output. One that returns ``(out, state)`` has an attribute ``output_size``,
            the width of ``out``.
        batch_first: whether sequences are (B, T, ·) rather than (T, B, ·).
    """

    def __init__(self, cell: nn.Module, batch_first: bool = False):
        super().__init__()
        self.cell = cell
        self.batch_first = batch_first

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of all steps and the final state.

        Args:
            x: (T, B, I), or (B, T, I) with ``batch_first``.
            state: the initial state; may be left out if the cell has a ``hidden_size``: zeros.

        Raises:
            ValueError: no steps, or no initial state where the cell has no ``hidden_size``.
        """
        x = x.transpose(0, 1) if self.batch_first else x
        if x.dim() != 3 or len(x) == 0:
            raise ValueError(f"a sequence must be (T, B, I) with at least one step, not {tuple(x.shape)} (time first).")
        parts = self.initial_parts(x, state)
        out, *final = self.unroll(x, parts)
        final = final[self.extra_outputs :]
        single = len(final) == 1 and not isinstance(state, tuple)
        return out.transpose(0, 1) if self.batch_first else out, final[0] if single else tuple(final)

    def unroll(self, x: Tensor, parts: Sequence[Tensor], ends: Ends | None = None) -> Sequence[Tensor]:
        """Return the outputs (T, B, H) and the parts of the final state, from those of the initial one.

        Args:
            x: (T, B, I).
            parts: of the initial state.
            ends: takes of (T, B, ·) what is behind the last step of each sequence; ``None``: behind the last of all.
        """
        steps = run_steps(self.cell, x, parts)
        out = torch.stack([step[0] for step in steps])
        if ends is None:
            return [out, *steps[-1]]
        return [out, *(ends(torch.stack(part)) for part in zip(*steps, strict=True))]

    @property
    def extra_outputs(self) -> int:
        """How many parts that no step reads are unrolled before a state's own: 1 if the output is none of these."""
        return int(output_size(self.cell) is not None)

    def initial_parts(self, x: Tensor, state: Any) -> tuple[Tensor, ...]:
        """Return the parts that are unrolled, from the state that :meth:`forward` is given, for ``x`` (T, B, I)."""
        given = self._zeros(x) if state is None else state if isinstance(state, tuple) else (state,)
        size = output_size(self.cell)
        return given if size is None else (x.new_zeros(x.shape[1], size), *given)

    def _zeros(self, x: Tensor) -> tuple[Tensor, ...]:
        size = getattr(self.cell, "hidden_size", None)
        if size is None:
            raise ValueError(f"{type(self.cell).__name__} has no hidden_size: pass the initial state.")
        parts = 2 if isinstance(self.cell, nn.LSTMCell) else getattr(self.cell, "parts", 1)
        return (x.new_zeros(x.shape[1], size),) * parts


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


def run_steps(cell: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Return the state behind every step, part by part."""
    advance: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = partial(apply_cell, cell)
    if isinstance(cell, ElementwiseCell):
        advance, x = cell.advance, cell.fed(x)
    steps: list[tuple[Tensor, ...]] = []
    for fed in x:
        parts = advance(fed, parts)
        steps.append(tuple(parts))
    return steps


def apply_cell(cell: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the parts of the state behind one step, and before them the output if it is none of them."""
    extra = int(output_size(cell) is not None)
    given = parts[extra:]
    found = cell(x, given[0] if len(given) == 1 else tuple(given))
    out, state = ((found[0],), found[1]) if extra and type(found) is tuple and len(found) == 2 else ((), found)
    after = (*out, *(state if isinstance(state, tuple) else (state,)))
    if len(after) != len(parts) or not all(isinstance(part, Tensor) for part in after):
        name = type(cell).__name__
        raise ValueError(
            f"{name} was given a state of {len(given)} and "
            + (
                "has an output_size, but did not return (out, state)."
                if extra
                else f"did not return such a one. If it returns (out, state), set {name}.output_size, the width of out."
            )
        )
    return after


def output_size(cell: nn.Module) -> int | None:
    """Return the width of what a cell returns beside its state; ``None``: nothing."""
    return None if isinstance(cell, ElementwiseCell) else getattr(cell, "output_size", None)


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
