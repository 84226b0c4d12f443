"""What calls of a cell that follow each other leave behind for the backward pass."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, plus
from gradfree.chains.chain import ChainGradients
from gradfree.chains.solving import Attachment
from gradfree.errors import ChainError
from gradfree.loops.loop_inputs import LoopInputs
from gradfree.loops.loop_nodes import LOOP_EXIT, LoopExit, LoopStart
from gradfree.time.unrolled_chain import StepsAgain, StepsTaken, autocast_now
from gradfree.torchside.graph import asked_for, keeps_graph
from gradfree.torchside.guards import (
    Marks,
    check_finite,
    check_made_finite,
    held_marks,
    refuse_batched,
    saved,
    unlike_any,
)
from gradfree.torchside.hooks import spare_hooks


class CalledCell(Protocol):
    """What a pass knows of its loop."""

    attachment: Attachment
    again: StepsAgain
    path: str

    @property
    def mode(self) -> str | None:
        """Which of torch's own cells it is, if any."""

    def solving(self) -> AbstractContextManager[None]:
        """Record no calls of the cell inside the block."""

    def parameters(self) -> list[Tensor]:
        """Return the cell's."""


class _Part(NamedTuple):
    """A part of a state that was handed on.

    Attributes:
        kept: its values.
        version: their count of changes in place.
        handed: what the model has.
        hooks: the gradient hooks on it, which the graph has as long as itself.
    """

    kept: Tensor
    version: int
    handed: weakref.ref[Tensor]
    hooks: weakref.ref[OrderedDict[int, Any]]


class LoopPass:
    """Calls of a cell of which each was given the state behind the one before.

    Args:
        cell: what is called.
        x: the input of the first call.
        first: the initial state, part by part.

    Attributes:
        of: the cell, for as long as it is there; the pass keeps it until it is freed.
        mode: which of torch's own cells it is, if any.
        inputs: of the calls.
        asked: whether another loop's pass is asking for what its inputs send to these states.
    """

    def __init__(self, cell: CalledCell, x: Tensor, first: Sequence[Tensor]):
        self.cell, self.of, self.first = cell, weakref.ref(cell), list(first)
        self.parameters, self.mode = cell.parameters(), cell.mode
        # What a parameter's ``data`` is set to between the passes is not what the pass has run with.
        self._own = [p.detach() for p in self.parameters]
        self.wanted = [p.requires_grad for p in self.parameters]
        self.inputs = LoopInputs(x, cell.path)
        self.start: weakref.ref[Any]
        self.asked = False
        self.freed = False
        self._autocast = autocast_now(x)
        self._held: Marks = []
        self._steps: list[tuple[_Part, ...]] = []
        self._task = -1
        self._direct: list[list[Cotangent]] = []

    def given(self) -> list[Tensor]:
        """Return all that LoopStart takes."""
        return [*self.first, *self.inputs.given, *self.parameters]

    def has(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether ``parameters``, the cell's now, are those of the pass, with the same values trained."""
        known = zip_longest(self.parameters, self._own, self.wanted, parameters)
        return all(
            p is q and wanted is q.requires_grad and own.data_ptr() == q.data_ptr() for p, own, wanted, q in known
        )

    def begin(self) -> Tensor:
        """Put LoopStart before the first call; return what that is to follow: it needs a gradient if anything does."""
        before: Tensor = LoopStart.apply(self, *self.given())
        return before

    def follows(self, index: int) -> bool:
        """Tell whether the state behind call ``index`` is the last one."""
        return index == len(self._steps) - 1

    @property
    def length(self) -> int:
        """How many calls there have been."""
        return len(self._steps)

    def leave(self, parts: Sequence[Tensor], before: Tensor, drawn: bool) -> list[Tensor]:
        """Keep a state, and return it for the model.

        Args:
            parts: of the state.
            before: the one that the call was given, or LoopStart's.
            drawn: whether the call has drawn random numbers.
        """
        if not self._steps:
            self._held = unlike_any() if drawn else held_marks(self.cell.again.cell)
        kept = [part.detach() for part in parts]
        guard, *handed = LoopExit.apply(self, len(self._steps), before, *kept)
        # Of all hooks, those on tensors run even where the node itself will not, and this one before the others.
        guard.register_hook(self._check_start)
        step = []
        for own, state in zip(kept, handed, strict=True):
            hooks: OrderedDict[int, Any] = OrderedDict()
            # As Tensor.register_hook does for the first hook.
            state._backward_hooks = hooks
            state.grad_fn._register_hook_dict(state)
            step.append(_Part(own, own._version, weakref.ref(state), weakref.ref(hooks)))
        self._steps.append(tuple(step))
        return handed

    def _check_start(self, _: Cotangent) -> None:
        """Refuse a backward pass that will not reach the first call; spare hooks on states that it does not reach."""
        start = self.start()
        assert start is not None  # The graph that is walked leads to it.
        if not self.asked and not torch._C._will_engine_execute_node(start):
            self._begin_backward()
            self._refuse_asked()
        spare_hooks(part.hooks() for step in self._steps for part in step)

    def _refuse_asked(self) -> None:
        raise ChainError(
            f"torch.autograd.grad was asked for the gradient of a state of {self.cell.path}: inside a chain there "
            "is its direct cotangent only. Detach the engine, or ask for gradients of parameters or of what lies "
            "before the loop."
        )

    def _begin_backward(self) -> None:
        if self.freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its steps are freed. Call the first backward with "
                "retain_graph=True."
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._direct = task, [[None] * len(step) for step in self._steps]

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the state behind call ``index``, part by part."""
        if self.asked:  # The other pass hands them over itself.
            return
        self._begin_backward()
        refuse_batched(cotangents, self.cell.path)
        check_finite(cotangents, self.cell.path)
        for part, cotangent in enumerate(cotangents):
            if cotangent is not None:
                self._direct[index][part] = plus(self._direct[index][part], cotangent.clone())

    def receive(self, index: int, part: int, cotangent: Tensor) -> None:
        """Add what another loop's inputs send to a state."""
        self._begin_backward()
        if self._steps[index][part].hooks():
            raise ChainError(
                f"a state of {self.cell.path} has a gradient hook or retain_grad(), and is an input of another loop: "
                "the hook would not see that gradient. Remove it."
            )
        self._direct[index][part] = plus(self._direct[index][part], cotangent)

    def solve(self, node: Any) -> list[Cotangent]:
        """Return the gradients of all that LoopStart has taken."""
        cell = self.cell
        self._begin_backward()
        given = self.given()
        last = max((i for i, step in enumerate(self._direct) if any(e is not None for e in step)), default=None)
        if last is None:
            return [None] * len(given)
        self._refuse(last)
        keep = keeps_graph()
        saved(node, cell.path)
        with cell.solving():
            gradients = self._solved(last + 1)
        cell.attachment.solved.add(cell.attachment.path)
        of_inputs = gradients.inputs[0]
        back: list[Cotangent] = [None] * len(self.inputs.given)
        if of_inputs is not None and self.inputs.given:
            back = self.inputs.back(list(of_inputs.to(self.inputs.first.dtype)))
        made = [*gradients.initial, *back, *gradients.parameters]
        check_made_finite(made, cell.path)
        if not keep:
            self._steps, self._held, self.inputs.taken, self.freed = [], [], [], True
            del self.cell
        return [g if g is None else g.to(tensor.dtype) for g, tensor in zip(made, given, strict=True)]

    def _solved(self, count: int) -> ChainGradients:
        """Return the engine's gradients of the first calls, as many as the loss has reached."""
        steps, direct, mode = self._steps[:count], self._direct[:count], self.mode
        states = [torch.stack([part.kept for part in column]) for column in zip(*steps, strict=True)]
        x = torch.stack([taken.x.detach() for taken in self.inputs.taken[:count]])
        dtypes = [s.dtype if mode is None else self._own[0].dtype for s in states]
        cotangents = tuple(
            torch.stack([torch.zeros_like(s[0]) if e is None else e for e in column]).to(dtype)
            for column, s, dtype in zip(zip(*direct, strict=True), states, dtypes, strict=True)
        )
        first = [part.detach() for part in self.first]
        taken = StepsTaken(mode, x, states, first, self._own, self.wanted, self._held, self._autocast)
        return self.cell.again.solve(taken, cotangents)

    def _refuse(self, last: int) -> None:
        path = self.cell.path
        self.inputs.refuse()
        of_ours = (edge for edge in asked_for() if isinstance(edge[0], LOOP_EXIT) and edge[0].recording is self)
        asked = {(node.index, number - 1) for node, number in of_ours}
        for i, step in enumerate(self._steps):
            for n, part in enumerate(step):
                if i <= last and part.kept._version != part.version:
                    raise ChainError(
                        f"a state that {path} has returned was changed in place, and the backward pass needs it. Use "
                        "the out-of-place operation (h = h + x, not h += x)."
                    )
                state = part.handed()
                looked_at = part.hooks() or (state is not None and state.retains_grad)
                leads_on = len(step) > 1 and not (n == 0 and self.mode == "LSTM")
                if (i, n) in asked and (leads_on or i < len(self._steps) - 1):
                    self._refuse_asked()
                if looked_at and leads_on:
                    raise ChainError(
                        f"a part of a state that {path} has returned has a gradient hook or retain_grad(): it would "
                        "not see what other parts, computed from it inside the cell, send back. Remove it."
                    )
                if looked_at and i < len(self._steps) - 1:
                    raise ChainError(
                        f"a state that {path} has returned has got a gradient hook or retain_grad() after the next "
                        "call has used it: it would see the state's direct cotangent only, not its whole gradient. "
                        "Register it before, or remove it."
                    )
