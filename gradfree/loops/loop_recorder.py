"""Recording a cell that a model calls in a loop of its own."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradfree.chains.refusals import hooked, tapped
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.depth.without_graph import CallsByThread, RecordedForward
from gradfree.errors import ChainError, refuse
from gradfree.loops.loop_inputs import computed_from
from gradfree.loops.loop_nodes import LOOP_EXIT
from gradfree.loops.loop_pass import LoopPass
from gradfree.time.unrolled_chain import StepsAgain, own_form
from gradfree.torchside.around import uncompiled
from gradfree.torchside.guards import Marks, marks_of, refuse_transforms, unchanged
from gradfree.torchside.random_state import RandomState
from gradfree.torchside.sharding import sharded
from gradfree.torchside.unsaved import Unsaved


class _Call(NamedTuple):
    """What is known of a call when it begins; the cell runs without a graph."""

    recording: LoopPass
    before: Tensor
    state: Sequence[Tensor]
    marks: Marks
    random: RandomState | None
    without_graph: bool = True


class LoopRecorder(CallsByThread):
    """Records the calls of a cell: those that follow each other through the state make one chain.

    Args:
        attachment: solves it.
        site: the loop.
        cell: what is called.
    """

    def __init__(self, attachment: Attachment, site: Site, cell: nn.Module):
        super().__init__()
        self.attachment, self.cell, self.inside, self.splits = attachment, cell, site.inside, site.splits
        self.path = site.path or "the cell"
        self.names = list(inspect.signature(cell.forward).parameters)[:2]
        self.again = StepsAgain(attachment, cell, self.path)
        self._solving: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is going on."""
        return {**super().__getstate__(), "_solving": set()}

    def record(self) -> list[Removable]:
        """Record the calls of the cell; return what to take off again."""
        return [RecordedForward(self, self.cell, self.path), Unsaved(self.cell, {*RecordedForward.KEYS})]

    @property
    def mode(self) -> str | None:
        """Which of torch's own cells it is; a weight may be parametrised, or another one, at any time."""
        return own_form(self.cell)

    @contextmanager
    def solving(self) -> Iterator[None]:
        """Record no calls of the cell inside the block, in this thread."""
        self._solving.add(threading.get_ident())
        try:
            yield
        finally:
            self._solving.discard(threading.get_ident())

    def parameters(self) -> list[Tensor]:
        """Return the cell's."""
        return list(self.cell.parameters())

    # As hooks in depth are: what is compiled must not run past them.
    @uncompiled
    def enter(self, cell: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Join the pass that the call's state belongs to, or start one."""
        self.call = None
        if threading.get_ident() in self._solving or not torch.is_grad_enabled():
            return
        self._check()
        given = self._given(args, kwargs)
        if isinstance(given, str):
            self.splits[self.attachment.path] = f"{given}: autograd goes through it"
            return
        x, parts = given
        recording = self._joined(x, parts)
        before = parts[0] if recording is not None else None
        if recording is None:
            recording = LoopPass(self, x, parts)
            recording.inputs.take(x)
            before = recording.begin()
        assert before is not None
        if before.requires_grad:
            # A cell that draws random numbers does so from the first call on.
            first = self.mode is None and not recording.length
            random = RandomState.of(x.device) if first else None
            self.call = _Call(recording, before, parts, self._marks(x, parts), random)

    @uncompiled
    def leave(self, cell: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Return the state with the pass's history."""
        call, self.call = self.call, None
        if call is None:
            return None
        parts = out if type(out) is tuple else (out,)
        shapes = [part.shape if isinstance(part, Tensor) else None for part in parts]
        if shapes != [part.shape for part in call.state] or not all(part.is_floating_point() for part in parts):
            raise ChainError(
                f"{self.path} was given a state of shapes {[tuple(part.shape) for part in call.state]}, but did not "
                "return such a one: a cell returns the next state and nothing else. Return what else there is from the "
                "module around it, or leave the cell out of chains=[...]."
            )
        if not unchanged(call.marks, self._marks(call.recording.inputs.taken[-1].x, call.state)):
            raise ChainError(
                f"{self.path} changes its input, its state, a parameter or a buffer: an engine runs it again in the "
                "backward pass, which would change them once more. Compute new tensors instead, and keep statistics "
                "outside of the cell."
            )
        drawn = call.random is not None and call.random.moved
        handed = call.recording.leave(parts, call.before, drawn)
        return tuple(handed) if type(out) is tuple else handed[0]

    def _check(self) -> None:
        """Refuse what may have come since the engine was attached."""
        refuse_transforms(self.path)
        refuse(sharded(self.inside))
        refuse((*hooked({self.path: self.cell, **self.inside}), *tapped(self.inside)))
        if self.cell._forward_pre_hooks:
            raise ChainError(
                f"{self.path} has got a forward pre-hook, which may change what the engine has seen. Remove it."
            )

    def _marks(self, x: Tensor, parts: Sequence[Tensor]) -> Marks:
        """Return marks of what torch's own cells do not change."""
        return [] if self.mode is not None else marks_of([x, *parts, *self.cell.parameters(), *self.cell.buffers()])

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Sequence[Tensor]] | str:
        """Return the input and the parts of the state, or why the call is none of a cell's."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if len(args) + len(kwargs) > 2 or given.keys() - set(self.names):
            return "it is given more than an input and a state"
        x, state = (given.get(name) for name in self.names)
        if not isinstance(x, Tensor) or x.dim() < 2:
            return "its input is no batch, (B, I)"
        if state is None and self.mode is not None:
            hidden: Any = self.cell.hidden_size
            zeros = x.new_zeros(len(x), hidden)
            return x, [zeros] * (2 if self.mode == "LSTM" else 1)
        parts = state if type(state) is tuple else (state,)
        if not parts or not all(isinstance(part, Tensor) and part.dim() > 1 for part in parts):
            return "its state is neither a tensor (B, H) nor a tuple of them"
        if not all(part.is_floating_point() for part in parts):
            return "its state has other than real numbers in it"
        return x, parts

    def _joined(self, x: Tensor, parts: Sequence[Tensor]) -> LoopPass | None:
        """Return the pass that the state is the last one of, with the input taken; ``None`` to start another one."""
        node: Any = parts[0].grad_fn
        if not isinstance(node, LOOP_EXIT) or node.recording.of() is not self:
            seen = computed_from(parts[0]) if parts[0].requires_grad else None
            if seen is not None and any(other.recording.of() is self for other, _ in seen.states):
                self.splits[self.attachment.path] = (
                    "it was given what the model computes from a state, not the state behind a call"
                )
            return None
        recording: LoopPass = node.recording
        if problem := self._cannot_go_on(recording, node, x, parts):
            self.splits[self.attachment.path] = problem
            return None
        return recording

    def _cannot_go_on(self, recording: LoopPass, node: Any, x: Tensor, parts: Sequence[Tensor]) -> str | None:
        numbers = [part.output_nr if part.grad_fn is node else 0 for part in parts]
        if recording.freed or not recording.follows(node.index) or numbers != list(range(1, len(recording.first) + 1)):
            return "it was given a state that another call has used, or parts of several"
        if any(part._backward_hooks or part.retains_grad for part in parts):
            return "the state before it has a gradient hook or retain_grad(), which sees its whole gradient"
        if recording.mode != self.mode or not recording.has(self.parameters()):
            return "the cell has other parameters than in the call before, or others of them are trained"
        return recording.inputs.take(x)
