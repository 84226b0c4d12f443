"""The four nodes that cut autograd's graph at the borders of a chain's blocks.

One pass through a chain h_i = f_i(h_{i-1}) makes this graph (arrows point backward, as autograd walks)::

    loss -> ... -> Exit_L -> ... -> Exit_2 -> Exit_1 -> Start -> h_0, other inputs, every parameter
                     :                :         :
                   f_L's graph     f_2's     f_1's          each ends at its own Entry_i -> earlier leaves, Anchors

- *Start*, one per pass, lies before the first block. Autograd runs it last: its backward lets the engine solve the
  chain and returns all gradients.
- *Entry*, one per block, gives the block its state (and other inputs) without history, so that each block builds a
  separate graph. Its backward runs only if the loss uses a tensor from inside the block. Such a gradient belongs to the
  state before the block. It leads to the parameters of the blocks before it and to the leaves before the chain, so that
  ``torch.autograd.grad`` for these runs it, too. It does not lead to what would let autograd compute more than
  the engine asks for:

  - Start and h_0: ``torch.autograd.grad`` on one block's graph would walk through them;
  - the block's own parameters: the gradient of the block's input would be computed with those of its weights;
  - another Entry: VJPs of two states would run all entries between them.
- *Exit*, one per block, passes the block's output to the model. Its backward collects the direct cotangents e_i.
- *Anchor*, one for several blocks, stands for many leaves, so that each Entry leads to a few only.
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
from gradfree.torchside.private import Function, node_class, when_hooked


class Recording(Protocol):
    """A recorded pass, as its nodes see it."""

    start: weakref.ref[Any]
    parameters: Sequence[Tensor]
    solving: bool

    def collect(self, index: int, extra: bool, cotangents: Sequence[Cotangent]) -> None:
        """Store the direct cotangents of what link ``index`` has returned: its state, or its extra outputs."""

    def collect_inside(self, index: int, numbers: Sequence[int | None], cotangents: Sequence[Cotangent]) -> None:
        """Store the cotangents of the inputs of link ``index``, from tensors inside its block that the loss uses."""

    def observe(self, index: int, state: Tensor) -> None:
        """Called when the state after link ``index`` gets its first gradient hook."""

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
    """(pass, h_0, other inputs and parameters) -> an empty tensor, which the first Exit follows."""

    @staticmethod
    def forward(ctx: _Context, recording: Recording, state: Tensor, *inputs_and_parameters: Tensor) -> Tensor:
        """Connect the node and its pass."""
        ctx.recording = recording
        recording.start = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        # Only orders the nodes. Not the state itself: an integer state (tokens) could not require a gradient.
        return torch.empty(0, dtype=torch.float32, device=state.device)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[Cotangent, ...]:
        """Return all gradients of the chain."""
        refuse_second_derivatives()
        gradients = ctx.recording.solve()
        given = [*(t for t, _ in ctx.recording.inputs), *ctx.recording.parameters]
        reached = gradients[len(gradients) - len(given) :]
        spare_hooks(t for t, g in zip(given, reached, strict=True) if g is None)
        return None, *gradients


class Entry(Function):
    """(pass, link, its path, numbers, tensors, what it leads to) -> the tensors without history, for the block.

    ``numbers`` are the indices of the tensors among the inputs of the pass, ``None`` for the state. The tensors come in
    a list, which autograd does not look into.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        recording: weakref.ref[Recording],
        index: int,
        path: str,
        numbers: Sequence[int | None],
        tensors: Sequence[Tensor],
        *leads_to: Tensor,
    ) -> tuple[Tensor, ...]:
        """Detach the tensors; the results share memory and version counters with them."""
        ctx.recording, ctx.index, ctx.path, ctx.numbers = recording, index, path, numbers
        ctx.count = len(leads_to)
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in tensors])

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Give the pass the cotangents from inside the block; do nothing while the engine solves the chain."""
        recording = ctx.recording()
        if any(cotangent is not None for cotangent in cotangents):
            if recording is None:
                raise ChainError(ONLY_INSIDE.format(path=ctx.path))
            if not recording.solving:
                recording.collect_inside(ctx.index, ctx.numbers, cotangents)
        return (None,) * (5 + ctx.count)


class Anchor(Function):
    """(leaves and other anchors) -> an empty tensor for entries, which leads to them; keeps no pass alive."""

    @staticmethod
    def forward(ctx: _Context, *leads_to: Tensor) -> Tensor:
        """Store how many tensors there are."""
        ctx.count = len(leads_to)
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[None, ...]:
        """Return no gradients: entries give theirs to the pass."""
        return (None,) * ctx.count


class Exit(Function):
    """(pass, link, whether extra, previous tensor, outputs of the block) -> these outputs, for the model.

    For the block's state the previous tensor is the state before it, or Start's output. For extra outputs it is the
    block's state, so that ``torch.autograd.grad`` for that state runs this node, too.
    """

    @staticmethod
    def forward(
        ctx: _Context, recording: Recording, index: int, extra: bool, before: Tensor, outputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Detach the outputs; the results share memory and version counters with them."""
        ctx.recording, ctx.index, ctx.extra = recording, index, extra
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in outputs])

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Give the direct cotangents to the pass."""
        ctx.recording.collect(ctx.index, ctx.extra, cotangents)
        return None, None, None, None, None


START, ENTRY, EXIT = node_class(Start), node_class(Entry), node_class(Exit)
when_hooked(EXIT, lambda node, state: None if node.extra else node.recording.observe(node.index, state))
BORDERS = (START, ENTRY, EXIT)
"""Node classes that a block's graph must not lead to, except for its own Entry."""

ONLY_INSIDE = (
    "the loss uses a tensor from inside {path}, but no state of its chain: the gradient of that tensor cannot pass the "
    "chain then. Add it to the model's loss and call backward() once, return it from the block beside the state, or "
    "detach the engine for this pass."
)
