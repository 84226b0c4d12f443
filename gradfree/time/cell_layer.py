"""Recurrent layers of any cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten

from gradfree.algebra.block_scan import Blocks
from gradfree.loops.compiled import Compiler, run_plain_loop
from gradfree.loops.recurrence import Loop
from gradfree.time.packing import PackedRows, Padding
from gradfree.time.recorded_step import recorded_step
from gradfree.wording import one


class CellLayer(nn.Module):
    """Runs a cell over a sequence; an engine finds the layer as a chain in time.

    Use it in place of a loop over steps, with a cell of yours. For ``nn.GRUCell``, ``nn.LSTMCell`` and ``nn.RNNCell``
    torch's layers are faster, with and without an engine. :func:`gradfree.scan` is the same for functions.

    Args:
        cell: called as ``cell(x, state)`` with ``x`` (B, I), or with the tuple of these if the sequence is a tuple.
            Returns the next state, a tensor (B, H) or a tuple of tensors, the first of which is the output. A cell that
            returns ``(out, state)`` needs an attribute ``output_size``, the width of ``out``.
        batch_first: whether sequences are (B, T, ·) rather than (T, B, ·).
        scratch: whether the cell's buffers and tensor attributes carry nothing from step to step: it only writes to
            them, or writes before it reads. An engine may then run steps at once.
        compile: see :func:`gradfree.scan`; for any engine that runs the loop itself, and without one.

    Raises:
        TypeError: ``cell`` is a recurrent layer of torch's.
    """

    def __init__(self, cell: nn.Module, batch_first: bool = False, scratch: bool = False, compile: bool = False):
        super().__init__()
        if isinstance(cell, nn.RNNBase):
            raise TypeError(
                f"CellLayer takes a cell, such as nn.GRUCell. {type(cell).__name__} is a layer: call it as it is."
            )
        self.cell = cell
        self.batch_first = batch_first
        self.scratch = scratch
        self._compile = compile
        self._compiler: Compiler | None = None

    def forward(self, x: Any, state: Any = None) -> tuple[Any, Any]:
        """Return the outputs of all steps and the final state.

        Args:
            x: (T, B, I), or (B, T, I) with ``batch_first``; a tuple of such tensors, of which the cell gets the tuple
                of one step; or a ``PackedSequence``, for cells that treat each row separately.
            state: the initial state. ``None``: zeros, if the cell has a ``hidden_size``.

        Raises:
            ValueError: no steps, or no initial state for a cell without ``hidden_size``.
        """
        if isinstance(x, PackedSequence):
            return self._run_packed(x, state)
        x = self._time_first(x)
        parts = self.initial_parts(x, state)
        out, *final = self.unroll(x, parts)
        return out.transpose(0, 1) if self.batch_first else out, self._final(final, state)

    def _time_first(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(self._time_first, x))
        if not isinstance(x, Tensor):
            raise TypeError(
                f"a CellLayer takes a tensor, a tuple of tensors or a PackedSequence, not {one(type(x).__name__)}."
            )
        x = x.transpose(0, 1) if self.batch_first else x
        if x.dim() < 3 or len(x) == 0:
            raise ValueError(f"a sequence must be (T, B, I) with at least one step, not {tuple(x.shape)} (time first).")
        return x

    def _final(self, parts: Sequence[Tensor], state: Any) -> Any:
        parts = parts[self.extra_outputs :]
        return parts[0] if len(parts) == 1 and not isinstance(state, tuple) else tuple(parts)

    def _run_packed(self, packed: PackedSequence, state: Any) -> tuple[PackedSequence, Any]:
        """Run sequences of several lengths as one padded batch; the padding repeats each sequence's last input."""
        rows = PackedRows(packed)
        x = rows.padded()
        out, *final = self.unroll(x, self.initial_parts(x, rows.sorted(state)), rows.padding)
        return rows.packed(out), self._final([rows.unsorted(part) for part in final], state)

    def unroll(self, x: Any, parts: Sequence[Tensor], padding: Padding | None = None) -> Sequence[Tensor]:
        """Return the outputs (T, B, H) and the parts of the final state.

        Args:
            x: (T, B, I), or a tuple of such tensors.
            parts: the parts of the initial state.
            padding: the padding behind sequences of several lengths. ``None``: all have T steps.
        """
        return results(run_plain_loop(self.loop(x, parts, padding), self.compiler), padding)

    @property
    def compiler(self) -> Compiler | None:
        """What compiles chunks of steps; ``None``: they are not compiled."""
        if self._compile and self._compiler is None:
            self._compiler = Compiler()
        return self._compiler

    def __getstate__(self) -> dict[str, Any]:
        """Leave compiled functions out of copies."""
        return {**super().__getstate__(), "_compiler": None}

    def loop(self, x: Any, parts: Sequence[Tensor], padding: Padding | None, name: str = "the cell layer") -> Loop:
        """Return the loop over the steps; arguments as in :meth:`unroll`, and a name for messages."""
        cell: Any = self.cell
        by_units = runs_by_units(cell)
        x = cell.fed(x) if by_units else x

        def step(parts: tuple[Tensor, ...], x: Any) -> tuple[tuple[Tensor, ...], Any]:
            after = tuple(cell.advance(x, parts) if by_units else apply_cell(cell, x, parts))
            return after, after[0] if padding is None else after

        return Loop(step, tuple(parts), *tree_flatten(x), name)

    @property
    def extra_outputs(self) -> int:
        """1 if the cell's output is not a part of its state: it is then unrolled as an extra first part. Else 0."""
        return int(output_size(self.cell) is not None)

    @property
    def row_width(self) -> int | None:
        """How many numbers a state has for each sequence, as far as the cell's ``hidden_size`` tells, else ``None``."""
        size: int | None = getattr(self.cell, "hidden_size", None)
        return None if size is None else size * self._parts

    @property
    def _parts(self) -> int:
        return 2 if isinstance(self.cell, nn.LSTMCell) else getattr(self.cell, "parts", 1)

    def initial_parts(self, x: Any, state: Any) -> tuple[Tensor, ...]:
        """Return the initial values of all unrolled parts, from ``state`` and ``x`` as in :meth:`unroll`."""
        x = x[0] if isinstance(x, tuple) else x
        given = self._zeros(x) if state is None else state if isinstance(state, tuple) else (state,)
        size = output_size(self.cell)
        return given if size is None else (x.new_zeros(x.shape[1], size), *given)

    def _zeros(self, x: Tensor) -> tuple[Tensor, ...]:
        size = getattr(self.cell, "hidden_size", None)
        if size is None:
            raise ValueError(f"{type(self.cell).__name__} has no hidden_size: pass the initial state.")
        return (x.new_zeros(x.shape[1], size),) * self._parts


def results(found: tuple[Any, Any], padding: Padding | None) -> Sequence[Tensor]:
    """Return what :meth:`CellLayer.unroll` does, from the final carry and the outputs of its loop."""
    carry, ys = found
    if padding is not None:
        return [ys[0], *map(padding.last_steps, ys)]
    # Copies: a gradient hook on the final state gets no share of the outputs, as with torch's layers.
    return [ys, *(part.clone() for part in carry)]


class ElementwiseCell(nn.Module, ABC):
    """A cell that computes the next state unit by unit: F_t is diagonal, or has one small block for each unit.

    Only :meth:`fed`, which does not depend on the state, may mix units. So Newton's method takes few sweeps, each of
    them elementwise, and the backward pass takes one scan.

    Attributes:
        hidden_size: H, the number of units.
        parts: the number of tensors (B, H) in a state, 1 by default.
    """

    hidden_size: int
    parts: int = 1

    @abstractmethod
    def fed(self, x: Tensor) -> Tensor:
        """Return the units' inputs (..., F) from ``x`` (..., I), of one or many steps."""

    @abstractmethod
    def advance(self, fed: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the next state, unit by unit.

        Args:
            fed: what :meth:`fed` returns, (..., F).
            state: the parts of the previous state, (..., H) each.
        """

    def forward(self, x: Tensor, state: Any) -> Any:
        """Return the next state, a tensor (B, H) or a tuple, from ``x`` (B, I) and the previous state."""
        after = tuple(self.advance(self.fed(x), state if isinstance(state, tuple) else (state,)))
        return after if self.parts > 1 else after[0]


def run_steps(
    cell: nn.Module, x: Tensor, parts: Sequence[Tensor], where: str | None = None
) -> list[tuple[Tensor, ...]]:
    """Run ``cell`` step by step; return the parts of the state after each step.

    Args:
        cell: the cell.
        x: (T, B, I).
        parts: the parts of the initial state.
        where: the cell's path if an engine runs it without a graph, and again with one in the backward pass: its steps
            are checked, and the first one has a graph. ``None``: neither.
    """
    advance: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = partial(apply_cell, cell)
    needs_graph = where is not None
    if runs_by_units(cell):
        with torch.enable_grad() if needs_graph else nullcontext():
            fed = cell.fed(x)
        advance, x = cell.advance, fed.detach() if needs_graph else fed
    if where is not None:
        advance = partial(recorded_step, advance, where)
    steps: list[tuple[Tensor, ...]] = []
    for each in x:
        parts = _with_graph(advance, each, parts) if needs_graph and not steps else advance(each, parts)
        steps.append(tuple(parts))
    return steps


def _with_graph(
    advance: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]], x: Tensor, parts: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Run a step with a graph: what a cell computes once a sequence, such as its weights, needs it in later steps."""
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_() for part in parts]
        # Views, since a cell may change no leaf in place.
        after = advance(x.detach().requires_grad_(x.requires_grad), [leaf.view_as(leaf) for leaf in leaves])
    return tuple(part.detach() for part in after)


def runs_by_units(cell: nn.Module) -> TypeGuard[ElementwiseCell]:
    """Return whether a call of ``cell`` runs ``fed`` and ``advance`` only: no hooks, no ``forward`` of its own."""
    return isinstance(cell, ElementwiseCell) and type(cell).forward is ElementwiseCell.forward and not has_hooks(cell)


def has_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` has forward or backward hooks, or pre-hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def apply_cell(cell: nn.Module, x: Any, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run one step; return the parts of the next state, after the output if that is not one of them."""
    extra = int(output_size(cell) is not None)
    given = parts[extra:]
    found = cell(x, given[0] if len(given) == 1 else tuple(given))
    out, state = ((found[0],), found[1]) if extra and type(found) is tuple and len(found) == 2 else ((), found)
    after = (*out, *(state if isinstance(state, tuple) else (state,)))
    if len(after) != len(parts) or not all(isinstance(part, Tensor) for part in after):
        name = type(cell).__name__
        raise ValueError(
            f"{name} was called with a state of {len(given)} tensors. It "
            + (
                "has an output_size, but did not return (out, state)."
                if extra
                else f"must return as many. If it returns (out, state), set {name}.output_size, the width of out."
            )
        )
    return after


_LAYERS: dict[type[nn.Module], str] = {nn.GRUCell: "nn.GRU", nn.LSTMCell: "nn.LSTM", nn.RNNCell: "nn.RNN"}


def or_torchs_layer(cell: nn.Module) -> str:
    """Return how to make torch's layer from one of torch's cells, with the same weights; "" for other cells."""
    if (layer := _LAYERS.get(type(cell))) is None:
        return ""
    layer += f"(..., nonlinearity={cell.nonlinearity!r})" if isinstance(cell, nn.RNNCell) else ""
    return f", or {layer} and layer.load_state_dict({{f'{{n}}_l0': p for n, p in cell.state_dict().items()}})"


def state_problems(where: str, parts: Sequence[Tensor], x: Tensor) -> Iterator[str]:
    """Yield a problem for each part of the state that has not one row for each sequence of ``x`` (T, B, I)."""
    for part in parts:
        if isinstance(part, Tensor) and (part.dim() < 2 or len(part) != x.shape[1]):
            yield (
                f"{where}: the state must have a row for each of the {x.shape[1]} sequences, not {tuple(part.shape)}. "
                "Expand it, state.expand(batch, -1)."
            )


def output_size(cell: nn.Module) -> int | None:
    """Return the width of the output that a cell returns in addition to its state; ``None`` if it has none."""
    return None if isinstance(cell, ElementwiseCell) else getattr(cell, "output_size", None)


def unit_blocks(after: Sequence[Tensor], before: Sequence[Tensor]) -> Blocks:
    """Return ∂after_i/∂before_j unit by unit, for an elementwise function.

    Args:
        after: the parts of the next states, (T, B, H), with graphs, which are kept.
        before: the parts of the previous states.
    """
    return [
        torch.autograd.grad(part, before, torch.ones_like(part), retain_graph=True, allow_unused=True)
        if part.requires_grad
        else [None] * len(before)
        for part in after
    ]
