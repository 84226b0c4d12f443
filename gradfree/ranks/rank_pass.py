"""One rank's view of a pass through a model whose blocks are on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradfree import errors
from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.ports import Port, replaced, tensors_in
from gradfree.ranks.crossings import Arrived, anchor
from gradfree.ranks.messages import COTANGENT, STATE
from gradfree.ranks.model_part import ModelPart
from gradfree.ranks.placeholders import EarlyExit, absent_weight, placeholder


class RankPass:
    """Follows the model's forward on one rank, receives its first state, and sends its last one.

    The hooks and placeholders of blocks call it, and the stage does at the end of the forward. Engines use it in the
    backward pass as a :class:`~gradfree.engines.rank_segment.Neighbors`.

    Args:
        part: this rank's part of the model.
        ports: of all blocks.
        number: of the pass, the same on all ranks.

    Attributes:
        position: the index of this rank, from 0.
        count: the number of ranks.
        left_wants_cotangents: whether the rank before needs cotangents.
    """

    def __init__(self, part: ModelPart, ports: Sequence[Port], number: int):
        self.messages, self.device, self.number = part.messages, part.device, number
        self.position, self.count = part.messages.position, part.messages.count
        self._part, self._ports = part, ports
        self._blocks, self._run = part.placement.blocks, part.placement.runs[self.position]
        self._grad = torch.is_grad_enabled()
        self._next = 0
        self._rests: dict[int, Any] = {}
        self._arriving: tuple[torch.Size, torch.dtype] | None = None
        self._leaving: tuple[torch.Size, torch.dtype] | None = None
        self.left_wants_cotangents = False
        self._state: Tensor | None = None
        self._placeholders: list[tuple[Tensor, str]] = []

    @property
    def before(self) -> torch.Size | None:
        """The shape of the state that this rank has received; ``None`` on the first rank."""
        return None if self._arriving is None else self._arriving[0]

    def send_left(self, cotangent: Cotangent) -> None:
        """Send a cotangent to the rank before."""
        assert self._arriving is not None
        shape, dtype = self._arriving
        sent = torch.zeros(shape, dtype=dtype, device=self.device) if cotangent is None else cotangent.to(dtype)
        self.messages.send(sent, self.position - 1, self.number, COTANGENT, f"the cotangent of {self._entry}")

    def receive_right(self) -> Tensor:
        """Return the cotangent that the next rank has sent."""
        assert self._leaving is not None
        shape, dtype = self._leaving
        into, what = torch.empty(shape, dtype=dtype, device=self.device), f"the cotangent of {self._exit}"
        return self.messages.receive(into, self.position + 1, self.number, COTANGENT, what)

    def absent(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of a block on another rank: return a received state or NaN, or leave the model's forward.

        Raises:
            EarlyExit: the block comes after this rank's blocks.
        """
        state = self._begin(index, args, kwargs)
        if index >= self._run.stop:
            if state is not self._state:
                raise errors.BETWEEN.error(path=self._blocks[index])
            raise EarlyExit
        if index == 0:
            (self._state,), (self.left_wants_cotangents, self._rests) = self.messages.receive_all(
                self.position - 1, self.number, STATE, self._entry, self.device
            )
            self._arriving = self._state.shape, self._state.dtype
        assert self._state is not None
        if index == self._run.start - 1:
            if self.left_wants_cotangents:
                self._state = Arrived.apply(partial(_refuse_cotangent, self._blocks[index]), self._state, anchor())
            out = self._state
        else:
            out = placeholder(self._state.detach().requires_grad_(self._grad))
            self._placeholders.append((out, self._blocks[index]))
        port = self._ports[index]
        return port.join(out, port.split(self._rests[index])[1]) if index in self._rests else out

    def block_begins(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before a block of this rank; return new arguments for the first block if it needs cotangents."""
        state = self._begin(index, args, kwargs)
        if index == self._run.start > 0 and state is not self._state:
            raise errors.BETWEEN.error(path=self._blocks[index])
        if self._part.is_new((index, self._grad)):
            path = self._blocks[index]
            others = [t for t in tensors_in([*args, *kwargs.values()]) if t is not state]
            self._refuse_absent(others, f"an input of {path}, beside its state,")
            if index == 0:
                self._refuse_absent([state], f"the input state of {path}")
        if index != self._run.start or not self.left_wants_cotangents:
            return None
        # The engine sends the cotangent of this new node. The model's tensor, of another node, must not get one.
        _, inputs, put = self._ports[index].take(args, kwargs)
        return put(Arrived.apply(None, state.detach(), anchor()), inputs)

    def block_ends(self, index: int, out: Any) -> None:
        """Called after a block of this rank; stores its output if other ranks need a part of it."""
        state, _ = self._ports[index].split(out)
        assert state is not None  # The recorder's hook has raised otherwise.
        if not isinstance(out, Tensor) and self.position < self.count - 1:
            if len(tensors_in(out)) > 1:
                raise errors.SECOND_OUTPUT.error(path=self._blocks[index])
            self._rests[index] = replaced(out, {id(state): torch.zeros(0)})
        if index == self._run.stop - 1:
            self._state, self._leaving = state, (state.shape, state.dtype)

    def send_right(self) -> None:
        """Send the last state to the next rank."""
        state = self._state
        assert state is not None
        extra = self._grad and state.requires_grad, self._rests
        self.messages.send_all([state], self.position + 1, self.number, STATE, self._exit, extra)

    def end(self, out: Any) -> Any:
        """Check and return the model's output on the last rank."""
        if self._next != len(self._blocks) or self.position < self.count - 1:
            raise errors.BLOCK_ORDER.error(path=self._blocks[self._next])
        tensors = tensors_in(out)
        if self._grad and self.count > 1 and not tensors and hasattr(out, "__dict__"):
            raise errors.NO_OUTPUT.error(kind=type(out).__name__)
        if self._part.is_new(("outputs", str([(t.shape, t.dtype, t.requires_grad) for t in tensors]))):
            self._refuse_absent(tensors, "what the model returns")
        return out

    @property
    def last_state(self) -> Tensor | None:
        """The output state of this rank's last block, if it needs a gradient."""
        return self._state if self._grad and self._state is not None and self._state.requires_grad else None

    def sent(self) -> Tensor:
        """Return the tensor by which backward passes reach this rank's chain, and drop the reference to it.

        Otherwise there would be a reference cycle: the tensor's graph keeps this pass alive until its backward pass.
        """
        state = self.last_state
        self._state, self._placeholders = None, []
        return anchor() if state is None else state

    @property
    def _entry(self) -> str:
        return f"the state after {self._blocks[self._run.start - 1]}"

    @property
    def _exit(self) -> str:
        return f"the state after {self._blocks[self._run.stop - 1]}"

    def _begin(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if index != self._next:
            raise errors.BLOCK_ORDER.error(path=self._blocks[index])
        self._next += 1
        state, others, _ = self._ports[index].take(args, kwargs)
        if state is None:
            raise errors.NO_STATE.error(path=self._blocks[index])
        if state.is_nested:
            raise errors.NESTED.error(path=self._blocks[index])
        if any(other is not state for other in others):
            raise errors.SECOND_INPUT.error(path=self._blocks[index])
        return state

    def _refuse_absent(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raise if ``tensors`` were computed from placeholders: these are in their graph, or the values are NaN."""
        states = {id(state): f"the output of {path}" for state, path in self._placeholders}
        if name := absent_weight(tensors, self._part.absent | states):
            raise errors.ELSEWHERE.error(what=what, name=name)
        for tensor in tensors:
            if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
                raise errors.NAN_FROM_ELSEWHERE.error(what=what)


def _refuse_cotangent(path: str, cotangent: Cotangent) -> None:
    """Raise if the loss uses a received state by other operations than the next block."""
    if cotangent is not None:
        raise errors.LOSS_ELSEWHERE.error(path=path)
