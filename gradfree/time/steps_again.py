"""The steps of one cell in the backward pass, all at once: of a layer, or of calls that a model makes in a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfree.chains.chain import ChainGradients
from gradfree.chains.solving import Attachment
from gradfree.time.chain import TimeChain
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import State
from gradfree.time.unrolled_chain import UnrolledChain, check_rows
from gradfree.torchside.marks import Marks, held_marks, unchanged


class StepsTaken(NamedTuple):
    """What steps of a cell have left behind.

    Attributes:
        mode: which of torch's own cells it is; ``None`` if none of them: see :func:`closed_form`.
        x: (T, B, I).
        states: behind each step, part by part, (T, B, ·).
        first: the initial state, (B, ·).
        parameters: the cell's, in the pass.
        wanted: which of them needed a gradient then.
        held: what :func:`held_marks` was then.
        autocast: as in the pass.
        told: what the way that the engine has run them in tells it.
    """

    mode: str | None
    x: Tensor
    states: Sequence[Tensor]
    first: Sequence[Tensor]
    parameters: Sequence[Tensor]
    wanted: Sequence[bool]
    held: Marks
    autocast: torch.autocast
    told: Any = None


class StepsAgain:
    """Lets an engine solve the steps of a cell, and holds the cell to its forward passes.

    Args:
        attachment: solves.
        cell: the cell.
        where: what it is called in messages.
    """

    def __init__(self, attachment: Attachment, cell: nn.Module, where: str):
        self.attachment, self.cell, self.where = attachment, cell, where
        self.compared: Marks = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the cell held when it was last compared: that of a copy is another."""
        return {**self.__dict__, "compared": []}

    def solve(self, taken: StepsTaken, direct: State) -> ChainGradients:
        """Return the engine's gradients for the direct cotangents of the states.

        Raises:
            ChainError: the cell gives other states than in the pass.
        """
        x, states, first, parameters = taken.x, taken.states, taken.first, taken.parameters
        autocast, chain = taken.autocast, None
        if taken.mode is not None:
            # As in torch's recurrent modules: in the weights' precision, whatever autocast ran the cell in.
            dtype = parameters[0].dtype
            x, first, states = x.to(dtype), [f.to(dtype) for f in first], [s.to(dtype) for s in states]
            autocast = torch.autocast(x.device.type, enabled=False)
        with autocast:
            memory = self.attachment.memory
            if taken.mode is not None:
                chain: TimeChain = CellChain(
                    taken.mode, x, states[0], first, parameters, [True, *taken.wanted], memory, "0"
                )
            else:
                chain = self._unrolled(taken)
            chain.told = taken.told
            return self.attachment.solve(chain, direct)

    def _unrolled(self, taken: StepsTaken) -> UnrolledChain:
        before = [torch.cat([f.unsqueeze(0), s[:-1]]) for f, s in zip(taken.first, taken.states, strict=True)]
        memory = self.attachment.memory
        chain = UnrolledChain(self.cell, taken.x, before, taken.parameters, taken.wanted, memory, self.where)
        chain.keep_graph = self.attachment.compares
        # To compare is a sync. Once is enough to find a cell that draws random numbers, counts or mixes rows, which one
        # step alone does not tell; until something of the cell changes: its mode, a rate, a mask that it keeps.
        now = held_marks(self.cell)
        if not (unchanged(taken.held, now) and unchanged(taken.held, self.compared)):
            within = max(self.attachment.engine.outputs_within(s.dtype) for s in taken.states)
            check_rows(chain.after, taken.states, self.where, within)
            self.compared = now if len(taken.x) > 1 else []
        return chain


def autocast_now(x: Tensor) -> torch.autocast:
    """Return the autocast that is on for the device of ``x``."""
    kind = x.device.type
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def closed_form(cell: nn.Module) -> str | None:
    """Return the name of the cell if it is one of torch's own and nothing has changed what it computes."""
    as_made = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    if "forward" in vars(cell) or cell._forward_pre_hooks or cell._forward_hooks or list(cell._parameters) != as_made:
        return None
    names: dict[type, str] = {nn.GRUCell: "GRU", nn.LSTMCell: "LSTM"}
    if type(cell) is nn.RNNCell:
        return f"RNN_{cell.nonlinearity.upper()}"
    return names.get(type(cell))


def cell_problems(where: str, cell: nn.Module) -> Iterator[str]:
    """Yield what keeps the steps of ``cell``, at the path ``where``, from being run again at once."""
    for name, module in cell.named_modules(prefix=where):
        if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            yield (
                f"{name} has hooks: an engine runs the cell without a graph, "
                "so what they see has no gradient. Remove them while an engine is attached."
            )
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
            yield (
                f"{name} is a {type(module).__name__}: an engine runs the cell again in the backward pass, which "
                "would draw other masks or count statistics twice. Put it outside the cell."
            )
