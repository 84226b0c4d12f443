"""Cells that a model calls in a loop of its own, as chains in time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn

from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.depth.without_graph import recorder_of
from gradfree.loops.loop_recorder import LoopRecorder
from gradfree.time.cell_layer import CellLayer, ElementwiseCell
from gradfree.time.unrolled_chain import cell_problems, closed_form
from gradfree.torchside.sharding import sharded


class LoopedCell(Site):
    """A cell, by name: torch's, or any module with a ``hidden_size`` that takes an input and a state and no more.

    Calls of which each is given the state behind the one before make one chain, as the steps of a
    :class:`~gradfree.CellLayer` do. Where that is not so, or inputs depend on the states, another chain starts.
    """

    dimension = "time"
    looks_like = ""
    may_be = "a cell that the model calls in a loop (torch's, or a module with a hidden_size and forward(x, state))"

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Tell whether ``module`` is a cell."""
        if isinstance(module, nn.RNNCellBase | ElementwiseCell):
            return True
        # Layers take sequences: they are chains of other kinds.
        if isinstance(module, nn.RNNBase | CellLayer) or not isinstance(getattr(module, "hidden_size", None), int):
            return False
        # Its class's: an engine that is on the cell stands in for the forward of the cell itself.
        _, *taken = inspect.signature(type(module).forward).parameters.values()
        return len(taken) == 2 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in taken)

    @classmethod
    def is_evident(cls, module: nn.Module) -> bool:
        """Never: whether it is called in a loop, a pass alone tells."""
        return False

    @property
    def has_residual(self) -> bool:
        """Whether it is known what the cell carries."""
        return closed_form(self._cell) in ("GRU", "LSTM") or isinstance(self._cell, ElementwiseCell)

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return a vector's shape: of the gate of h or, for LSTM, of c; of other cells that of every part."""
        cell = self._cell
        part = int(closed_form(cell) == "LSTM")
        parts = range(cell.parts) if isinstance(cell, ElementwiseCell) else (part,)
        return {f"0.{n}": (cell.hidden_size,) for n in parts}  # type: ignore[misc]

    @classmethod
    def attachment_on(cls, module: nn.Module) -> Attachment | None:
        """Return the engine of what records the calls of the cell."""
        recorder = recorder_of(module)
        return recorder.attachment if isinstance(recorder, LoopRecorder) else None

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the cell."""
        yield from sharded({self.path: self._cell, **self.inside})
        where = self.path or "the model"
        if self.holds_engine(self._cell):
            yield f"{where} has an engine attached already: call detach() on its handle first."
            return
        if "forward" in vars(self._cell):
            yield (
                f"{where} has a forward of its own on the instance, which an engine's would replace. Remove it while "
                "an engine is attached, or put the cell into a module with that forward."
            )
        yield from cell_problems(self.path, self._cell)
        if self._cell._forward_pre_hooks:
            yield f"{where} has forward pre-hooks, which may change what an engine sees. Remove them."

    def record(self, attachment: Attachment) -> Sequence[Removable]:
        """Record the calls of the cell."""
        return LoopRecorder(attachment, self, self._cell).record()

    @property
    def _cell(self) -> nn.Module:
        return self.blocks[self.path]

    def __str__(self) -> str:
        return f"{type(self._cell).__name__}, called in a loop, in time"
