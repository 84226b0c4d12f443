"""Nodes of autograd's graph that cut it at the borders of a chain's blocks.

- *Start*, before the first block, takes the initial state and every trainable parameter of the chain. Autograd
  runs it last, when every direct cotangent is known: it lets the engine solve and returns all gradients.
- *Entries*, before blocks, give them states without history: each block builds a graph of its own.
- *Exits*, behind blocks, hand the states on. Their backward only collects the direct cotangents e_i.

An autograd function costs more than many a block. So one node of Entries or Exits serves several blocks to come: it is
made with outputs that are yet empty, and each is given its state, as ``.data``, when that is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge

from gradfree.algebra.cotangents import Cotangent
from gradfree.errors import ChainError
from gradfree.torchside.graph import walk
from gradfree.torchside.guards import refuse_second_derivatives
from gradfree.torchside.hooks import spare_hooks


class Recorded(Protocol):
    """A recorded pass: what the nodes have to tell."""

    start: weakref.ref[Any]
    inputs: list[tuple[Tensor, GradientEdge]]
    parameters: Sequence[Tensor]

    def begin_backward(self) -> None:
        """Forget what another backward pass has left; refuse one that cannot be."""

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the states from that of link ``index`` on."""

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""


class _Context(FunctionCtx):
    recording: Recorded
    index: int
    paths: list[str]


class Start(torch.autograd.Function):
    """(pass, h_0, other inputs and parameters) -> what the first Exits continue from."""

    @staticmethod
    def forward(ctx: _Context, recording: Recorded, state: Tensor, *inputs_and_parameters: Tensor) -> Tensor:
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
        recording = ctx.recording
        initial, *gradients = recording.solve()
        given = *(tensor for tensor, _ in recording.inputs), *recording.parameters
        spare_hooks(tensor for tensor, g in zip(given, gradients, strict=True) if g is None)
        return None, initial, *gradients


class Exits(torch.autograd.Function):
    """(pass, link, the state or Start before, a link's output, n) -> a guard, that output, and n more for such."""

    @staticmethod
    def forward(
        ctx: _Context, recording: Recorded, index: int, before: Tensor, out: Tensor, more: int
    ) -> tuple[Tensor, ...]:
        """Hand on ``out``, of link ``index``, and what the ``more`` links behind it will leave."""
        ctx.recording, ctx.index = recording, index
        ctx.set_materialize_grads(False)
        return out.new_empty(0), out.detach(), *_empty_like(out, more)

    @staticmethod
    def backward(ctx: _Context, _: None, *cotangents: Cotangent) -> tuple[None, ...]:
        """Keep the direct cotangents."""
        ctx.recording.collect(ctx.index, cotangents)
        return None, None, None, None, None


class Entries(torch.autograd.Function):
    """(paths, n, tensors of a call) -> these without history, and n more like the first for the calls to come."""

    @staticmethod
    def forward(ctx: _Context, paths: list[str], more: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Remember whose inputs the outputs are: ``paths`` grows with the calls."""
        ctx.paths = paths
        ctx.set_materialize_grads(False)
        return *(t.detach() for t in tensors), *_empty_like(tensors[0], more)

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Refuse: the engine's own passes stop at this node; only a graph that left a block elsewhere runs it."""
        index = next(i for i, c in enumerate(cotangents) if c is not None)
        raise ChainError(_LEFT_THE_BLOCK.format(path=ctx.paths[index]))


START: Any = Start._backward_cls
EXITS: Any = Exits._backward_cls
ENTRIES: Any = Entries._backward_cls
BORDERS = (START, EXITS, ENTRIES)
"""The classes of the nodes."""

_LEFT_THE_BLOCK = (
    "the loss uses a tensor from inside {path} (one of its inputs, a loss or feature computed in it, or what it "
    "returns beside the state) that is not the block's output: its gradient cannot pass the chain. Use the states that "
    "the blocks return instead, or leave the blocks around {path} out of the chain."
)


def refuse_entries(loss: Tensor) -> None:
    """Refuse a loss on tensors from inside blocks beforehand: ``torch.autograd.grad`` would not run their nodes."""
    for node in walk([loss]).nodes:
        for before, index in node.next_functions:
            if isinstance(before, ENTRIES):
                raise ChainError(_LEFT_THE_BLOCK.format(path=before.paths[index]))


class Outputs:
    """The outputs of one node that are yet empty, the next one last.

    Args:
        outputs: of Entries or Exits.
    """

    def __init__(self, outputs: Sequence[Tensor] = ()):
        self._empty = list(reversed(outputs))

    def fill(self, state: Tensor) -> Tensor | None:
        """Return the next output with ``state`` in it; ``None`` if none is left, or they are not like it."""
        # What Dynamo makes of a write to .data counts as a change in place.
        if not self._empty or torch.compiler.is_dynamo_compiling():
            return None
        output = self._empty[-1]
        if output.shape != state.shape or output.dtype is not state.dtype or output.device != state.device:
            return None
        if type(state) is not Tensor:
            return None
        output.data = state
        return self._empty.pop()


def edge(tensor: Tensor) -> GradientEdge:
    """Return where a tensor with history comes from, quicker than torch's own function for any tensor."""
    node = tensor.grad_fn
    assert node is not None
    return GradientEdge(node, tensor.output_nr)


def _empty_like(tensor: Tensor, count: int) -> list[Tensor]:
    """Return tensors that only know their shape, which autograd holds their gradients to."""
    strides = [0] * tensor.dim()
    return [tensor.new_empty_strided(tensor.shape, strides) for _ in range(count)]
