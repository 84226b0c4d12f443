"""One pass through a model whose blocks lie on several ranks, as one of them goes through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.site import Site
from gradfree.depth.ports import Port, replaced, tensors_in
from gradfree.depth.recording import recorded_links
from gradfree.errors import ChainError
from gradfree.ranks.absent import Left, nowhere
from gradfree.ranks.crossings import Arrived
from gradfree.ranks.messages import COTANGENT, NOTE, STATE, TAP, Halt, Messages
from gradfree.ranks.placement import Placement
from gradfree.torchside.graph import walk


class Staged(Protocol):
    """What a pass has to know of its rank."""

    messages: Messages
    placement: Placement
    site: Site
    taps: Sequence[int]
    ports: list[Port]
    gone: dict[int, str]

    @property
    def device(self) -> torch.device:
        """Where its states are."""

    def is_new(self, what: object) -> bool:
        """Tell whether ``what`` has not been asked for before."""

    def keep(self, first: Tensor, of: RankPass) -> None:
        """Keep a pass for its backward pass, as that whose first block has returned ``first``."""


class _Like(NamedTuple):
    """A state, but for its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _like(state: Tensor) -> _Like:
    return _Like(state.shape, state.dtype, state.device)


class RankPass:
    """What a rank goes through: its blocks and their stand-ins tell of themselves, the stage of how it ends.

    For engines it is the :class:`~gradfree.chains.line.Line` of its backward pass.

    Args:
        stage: the rank's.
        number: of the pass, the same on all ranks.

    Attributes:
        before: the shape of the state that the rank's first block was given by the rank before.
    """

    def __init__(self, stage: Staged, number: int):
        self._stage, self.number, self._messages = stage, number, stage.messages
        self._blocks, self._run = stage.placement.blocks, stage.placement.runs[stage.messages.position]
        self._grad = torch.is_grad_enabled()
        self._next = 0
        self._rests: dict[int, Any] = {}
        self._arriving: _Like | None = None
        self._leaving: _Like | None = None
        self.wanted = False
        self._state: Tensor | None = None
        self._noted = False
        self._forget()

    @property
    def position(self) -> int:
        """The place of this rank."""
        return self._messages.position

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self._messages.count

    @property
    def before(self) -> torch.Size | None:
        """The shape of the state that the first block was given, if that is one of the chain's."""
        return None if self._arriving is None else self._arriving.shape

    def to_left(self, cotangent: Cotangent) -> None:
        """Send the rank on the left a cotangent."""
        assert self._arriving is not None
        sent = self._arriving.empty().zero_() if cotangent is None else cotangent.to(self._arriving.dtype)
        self._messages.send(sent, self.position - 1, self.number, COTANGENT, f"the cotangent of {self._entry}")

    def from_right(self) -> Tensor:
        """Return what the rank on the right has sent."""
        assert self._leaving is not None
        into, what = self._leaving.empty(), f"the cotangent of {self._exit}"
        return self._messages.receive(into, self.position + 1, self.number, COTANGENT, what)

    def absent(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a block of another rank: return what that would, or leave the model's forward."""
        state = self._begin(index, args, kwargs)
        if index >= self._run.stop:
            if state is not self._state:
                raise ChainError(_BETWEEN.format(path=self._blocks[index]))
            raise Left(state)
        if index == 0:
            self._receive()
        assert self._arriving is not None
        assert self._state is not None
        if index == self._run.start - 1:
            if self.wanted:
                self._state = Arrived.apply(self._beside(index), self._state, _anchor())
            out = self._state
        elif index in self._stage.taps and self.position == self.count - 1:
            out = self._receive_tap(index)
        else:
            out = nowhere(self._state.detach().requires_grad_(self._grad))
            self._stands.append((out, self._blocks[index]))
        port = self._stage.ports[index]
        return port.join(out, port.split(self._rests[index])[1]) if index in self._rests else out

    def block_begins(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note that a block of this rank is about to run; return other arguments for it, if need be."""
        state = self._begin(index, args, kwargs)
        if index == self._run.start > 0 and state is not self._state:
            raise ChainError(_BETWEEN.format(path=self._blocks[index]))
        if self._stage.is_new((index, self._grad)):
            path = self._blocks[index]
            others = [t for t in tensors_in([*args, *kwargs.values()]) if t is not state]
            self._refuse_absent(others, f"{path} is given, beside its state, what")
            if index == 0:
                self._refuse_absent([state], f"the state that {path} is given")
        if index != self._run.start or not self.wanted:
            return None
        # The engine sends its cotangent on. What the model has of it, too, is another tensor: a tap.
        taken = self._stage.ports[index].take(args, kwargs)
        return taken.put(Arrived.apply(None, state.detach(), state, *self._arrived), taken.inputs)

    def block_ends(self, index: int, out: Any) -> None:
        """Note what a block of this rank has returned."""
        state, _ = self._stage.ports[index].split(out)
        assert state is not None  # The engine's own hook has refused it.
        on_last = self.position == self.count - 1
        if not isinstance(out, Tensor) and not on_last:
            if len(tensors_in(out)) > 1:
                raise ChainError(
                    f"{self._blocks[index]} returns tensors beside its state, which do not go to other ranks. Let it "
                    "return its state alone."
                )
            self._rests[index] = replaced(out, {id(state): torch.zeros(0)})
        if index in self._stage.taps and not on_last:
            self._send_tap(index, state)
        if index == self._run.stop - 1:
            self._state, self._leaving = state, _like(state)
            if self._grad and state.requires_grad:
                self._stage.keep(self._recorded(state), self)

    def give_up(self, halt: Halt) -> None:
        """Let the next rank know at once what has stopped this one, if it waits for what this pass was to send."""
        # That the connection may be lost, too, is no news then.
        with suppress(ChainError):
            if self.position < self.count - 1 and not self._noted:
                self._messages.send_note(halt, self.position + 1, self.number, NOTE, self._exit)

    def go_on(self) -> None:
        """Send the last state to the next rank."""
        state, to = self._state, self.position + 1
        assert state is not None
        note = (tuple(state.shape), state.dtype, self._grad and state.requires_grad, self._rests)
        self._noted = True
        self._messages.send_note(note, to, self.number, NOTE, self._exit)
        self._messages.send(state, to, self.number, STATE, self._exit)

    def end(self, out: Any) -> Any:
        """Return what the model does on the last rank, having looked at it."""
        if self._next != len(self._blocks) or self.position != self.count - 1:
            raise ChainError(f"the model has not run {self._blocks[self._next]}: across ranks every block runs once.")
        tensors = tensors_in(out)
        if self._stage.is_new(("outputs", str([(t.shape, t.dtype, t.requires_grad) for t in tensors]))):
            self._refuse_absent(tensors, "what the model returns")
        return out

    def left(self) -> list[tuple[Tensor, Callable[[], Tensor] | None]]:
        """Return, and let go of, what leads backward passes to this rank's chain, with how to get its cotangent.

        ``None``: the engine itself asks for it. The backward pass that this pass is kept for would keep the tensors.
        """
        state, departed = self._state, self._departed
        assert state is not None
        self._forget()
        return [(state if state.requires_grad else _anchor(), None), *departed]

    def _forget(self) -> None:
        """Let go of what is part of a graph."""
        self._state = None
        self._stands: list[tuple[Tensor, str]] = []
        self._arrived: list[Tensor] = []
        self._departed: list[tuple[Tensor, Callable[[], Tensor]]] = []

    @property
    def _entry(self) -> str:
        return f"the state behind {self._blocks[self._run.start - 1]}"

    @property
    def _exit(self) -> str:
        return f"the state behind {self._blocks[self._run.stop - 1]}"

    def _begin(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if index != self._next:
            came = f"{self._blocks[self._next]} was to come" if self._next < len(self._blocks) else "all have run"
            raise ChainError(
                f"{self._blocks[index]} has run where {came}: across ranks the blocks run once each, in their order."
            )
        self._next += 1
        state, others, _ = self._stage.ports[index].take(args, kwargs)
        if state is None:
            raise ChainError(
                f"the first argument of {self._blocks[index]} is no tensor. If another one is the state, say so with "
                "gradfree.register_port."
            )
        if any(other is not state for other in others):
            raise ChainError(
                f"{self._blocks[index]} is given a tensor that needs a gradient beside its state, which would not "
                "come back from other ranks. Detach it, or compute it in the block."
            )
        return state

    def _receive(self) -> None:
        source = self.position - 1
        shape, dtype, needed, self._rests = self._messages.receive_note(source, self.number, NOTE, self._entry)
        self._arriving, self.wanted = _Like(torch.Size(shape), dtype, self._stage.device), needed
        self._state = self._messages.receive(self._arriving.empty(), source, self.number, STATE, self._entry)

    def _send_tap(self, index: int, state: Tensor) -> None:
        what, to = f"the state behind {self._blocks[index]}", self.count - 1
        needed = self._grad and state.requires_grad
        if needed:
            take = partial(self._take_tap, _like(state), index, f"the cotangent of {what}, a tap")
            self._departed.append((state, take))
        if index == self._run.stop - 1 and self.position == to - 1:
            return  # It is sent anyway.
        self._messages.send_note((tuple(state.shape), state.dtype, needed), to, self.number, TAP + 2 * index, what)
        self._messages.send(state, to, self.number, TAP + 2 * index + 1, what)

    def _take_tap(self, like: _Like, index: int, what: str) -> Tensor:
        return self._messages.receive(like.empty(), self.count - 1, self.number, TAP + 2 * index + 1, what)

    def _receive_tap(self, index: int) -> Tensor:
        owner = next(rank for rank, run in enumerate(self._stage.placement.runs) if index in run)
        what = f"the state behind {self._blocks[index]}"
        shape, dtype, needed = self._messages.receive_note(owner, self.number, TAP + 2 * index, what)
        like = _Like(torch.Size(shape), dtype, self._stage.device)
        state = self._messages.receive(like.empty(), owner, self.number, TAP + 2 * index + 1, what)
        if not needed:
            return state
        send = partial(self._give_tap, like, owner, index, f"the cotangent of {what}, a tap")
        # On the way from the chain's first state, too: so that the cotangent is sent also where the loss has none.
        self._arrived.append(Arrived.apply(send, state, _anchor()))
        return self._arrived[-1]

    def _beside(self, index: int) -> Callable[[Cotangent], None]:
        """Return what is to be done with what the loss sends to the entering state itself."""
        if index in self._stage.taps and self.position == self.count - 1:
            assert self._arriving is not None
            what = f"the cotangent of {self._entry}, a tap"
            return partial(self._give_tap, self._arriving, self.position - 1, index, what)
        return partial(_refuse_beside, self._blocks[index])

    def _give_tap(self, like: _Like, owner: int, index: int, what: str, cotangent: Cotangent) -> None:
        sent = like.empty().zero_() if cotangent is None else cotangent
        self._messages.send(sent, owner, self.number, TAP + 2 * index + 1, what)

    def _recorded(self, state: Tensor) -> Tensor:
        """Return what the first link of the recorded pass has returned; refuse what is not recorded as one chain."""
        splits = self._stage.site.splits
        if splits:
            path, reason = next(iter(splits.items()))
            raise ChainError(f"across ranks the blocks must be one chain, but {path} is not part of it: {reason}.")
        links = recorded_links(state)
        if not links:
            raise ChainError(_BETWEEN.format(path=f"what comes after {self._blocks[self._run.stop - 1]}"))
        first: Tensor = links[0].out
        return first

    def _refuse_absent(self, tensors: Sequence[Tensor], what: str) -> None:
        """Refuse tensors that were computed of what is not there: autograd's graph tells, or NaN."""
        for leaf in walk(t for t in tensors if t.requires_grad).leaves:
            if name := self._stage.gone.get(id(leaf)):
                here, there = ("first", "last") if self.position == 0 else ("last", "first")
                raise ChainError(
                    f"{what} depends on {name}, which is not on this rank. If it is used on this side of the chain "
                    f"only, it should lie on the {here} rank: layer_parallel(..., {here}=[{name!r}]). What goes around "
                    f"the chain, from the {there} side, cannot be taken apart."
                )
            if path := next((path for stand, path in self._stands if stand is leaf), None):
                raise ChainError(
                    f"{what} depends on the state behind {path}, which is on another rank. Name it, so that it is "
                    f"sent: layer_parallel(..., taps=[{path!r}])."
                )
        for tensor in tensors:
            if (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any()):
                raise ChainError(
                    f"{what} is NaN in its first pass: it depends on weights that are on another rank, or the model or "
                    "its input is at fault. Weights around the chain are placed by layer_parallel(..., first=[...], "
                    "last=[...]); states that are used behind the chain are named by taps=[...]."
                )


_BETWEEN = (
    "{path} is not given what the block before it returned: across ranks nothing may be computed between blocks, nor "
    "by hooks that replace their outputs. Move it into a block."
)


def _refuse_beside(path: str, cotangent: Cotangent) -> None:
    if cotangent is not None:
        raise ChainError(
            f"the loss depends on the state behind {path} not only by the next block, which is on another rank. Name "
            f"it, so that its cotangent is sent: layer_parallel(..., taps=[{path!r}])."
        )


def _anchor() -> Tensor:
    """Return a leaf that makes autograd record what is computed with it."""
    return torch.zeros((), requires_grad=True)
