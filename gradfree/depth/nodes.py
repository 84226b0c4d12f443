"""The four nodes that cut autograd's graph at the borders of a chain's blocks.

One pass through a chain h_i = f_i(h_{i-1}) leaves this graph behind (arrows lead backward, as autograd walks)::

    loss -> ... -> Exit_L -> ... -> Exit_2 -> Exit_1 -> Start -> h_0, other inputs, every parameter
                     :                :         :
                   f_L's graph     f_2's     f_1's          each ends at its own Entry_i -> Anchor -> parameters

- *Start*, one a pass, before the first block. Autograd runs it last: its backward lets the engine solve the chain and
  returns all gradients.
- *Entry*, one a block, gives the block its state (and other inputs) without history, so that each block builds a graph
  of its own. Its backward runs only for what leaves a block elsewhere than by its output, such as a loss on a tensor
  from inside: such a gradient belongs to the state before the block.
- *Exit*, one a block, hands on what the block returned. Its backward collects the direct cotangents e_i.
- *Anchor* is what entries lead to: the parameters, so that ``torch.autograd.grad`` for these runs the
  entries, too. Never Start or h_0: an engine that asks a block's graph for gradients would walk through them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.algebra.cotangents import Cotangent
from gradfree.errors import ChainError
from gradfree.torchside.guards import refuse_second_derivatives
from gradfree.torchside.hooks import spare_hooks
from gradfree.torchside.private import Function, hooks_of, node_class


class Recording(Protocol):
    """A recorded pass, as its nodes see it."""

    start: weakref.ref[Any]
    parameters: Sequence[Tensor]
    solving: bool

    def collect(self, index: int, extra: bool, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of what link ``index`` has returned: its state, or its extra outputs."""

    def collect_inside(self, index: int, numbers: Sequence[int | None], cotangents: Sequence[Cotangent]) -> None:
        """Keep what came back to what link ``index`` was given."""

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""


class _Context(FunctionCtx):
    recording: Any
    index: int
    extra: bool
    path: str
    numbers: Sequence[int | None]
    count: int


class Start(Function):
    """(pass, h_0, other inputs and parameters) -> what the first Exit continues from."""

    @staticmethod
    def forward(ctx: _Context, recording: Recording, state: Tensor, *inputs_and_parameters: Tensor) -> Tensor:
        """Let the node know its pass."""
        ctx.recording = recording
        recording.start = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        # Only for the order of the nodes. Not the state itself: of whole numbers (tokens) it would need no gradient.
        return state.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[Cotangent, ...]:
        """Return all gradients of the chain."""
        refuse_second_derivatives()
        gradients = ctx.recording.solve()
        parameters = ctx.recording.parameters
        reached = gradients[len(gradients) - len(parameters) :]
        spare_hooks(hooks_of(p) for p, g in zip(parameters, reached, strict=True) if g is None)
        return None, *gradients


class Anchor(Function):
    """(a leaf that needs a gradient or another anchor, leaves) -> what entries lead to; it holds nothing of a pass."""

    @staticmethod
    def forward(ctx: _Context, *tensors: Tensor) -> Tensor:
        """Count them."""
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[None, ...]:
        """Return nothing: entries hand over what they get."""
        return (None,) * ctx.count


class Entry(Function):
    """(pass, link, its path, numbers, anchor, tensors) -> these tensors without history, for the block.

    ``numbers`` tell which inputs of the pass the tensors are; ``None``: the state. A list hides tensors from autograd.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        recording: weakref.ref[Recording],
        index: int,
        path: str,
        numbers: Sequence[int | None],
        anchor: Tensor,
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Hand them to the block; they share memory and version counters with the model's own."""
        ctx.recording, ctx.index, ctx.path, ctx.numbers = recording, index, path, numbers
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in tensors])

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Hand over what left the block elsewhere than by its output; the engine's own walks end here."""
        recording = ctx.recording()
        if recording is None:
            raise ChainError(INSIDE_ALONE.format(path=ctx.path))
        if not recording.solving:
            recording.collect_inside(ctx.index, ctx.numbers, cotangents)
        return None, None, None, None, None, None


class Exit(Function):
    """(pass, link, whether extra, what lies before, outputs of the block) -> the same for the model.

    Behind the state before, or Start, for the block's state; behind that for what the block returns besides: who asks
    for the gradient of the state comes by there.
    """

    @staticmethod
    def forward(
        ctx: _Context, recording: Recording, index: int, extra: bool, before: Tensor, outputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Hand them on; they share memory and version counters with the block's own."""
        ctx.recording, ctx.index, ctx.extra = recording, index, extra
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in outputs])

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Keep the direct cotangents."""
        ctx.recording.collect(ctx.index, ctx.extra, cotangents)
        return None, None, None, None, None


START, ENTRY, EXIT = node_class(Start), node_class(Entry), node_class(Exit)
BORDERS = (START, ENTRY, EXIT)
"""The classes of the nodes that no block's own graph leads to, but for its Entry."""

INSIDE_ALONE = (
    "the loss uses a tensor from inside {path}, but no state of the chain that it lies in: its gradient cannot pass "
    "the chain then. Add it to the model's loss and call backward() once, return it from the block beside the state, "
    "or detach the engine for this pass."
)
