"""Nodes of autograd's graph that cut it at the borders of a chain's blocks.

- *Start*, before the first block, takes the initial state and every trainable parameter of the chain. Autograd
  runs it last, when every direct cotangent is known: it lets the engine solve and returns all gradients.
- *Entries*, before blocks, give them states without history: each block builds a graph of its own. Their backward runs
  only for what left a block elsewhere than by its output, such as a loss inside it.
- *Exits*, behind blocks, hand the states on. Their backward only collects the direct cotangents e_i.
- *Aside*, one for each other tensor that a block returns, does the same for that.
- *Past*, behind a block that cannot be a link, leaves its graph to autograd.

An autograd function costs more than many a block. So one node of Entries or Exits serves several blocks to come: it is
made with outputs that are yet empty, and each is given its state, as ``.data``, when that is there.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

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

    chain: Any
    start: weakref.ref[Any]
    inputs: list[tuple[Tensor, GradientEdge]]
    solving: bool

    def leaves(self) -> Iterable[Sequence[Tensor]]:
        """Return what each parameter leads to: itself, or those that are stacked in it."""

    def begin_backward(self) -> None:
        """Forget what another backward pass has left; refuse one that cannot be."""

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the states from that of link ``index`` on."""

    def collect_aside(self, index: int, number: int, cotangent: Cotangent) -> None:
        """Keep the cotangent of what link ``index`` returned beside its state."""

    def collect_inside(self, entered: Entered, cotangent: Cotangent) -> None:
        """Keep what came back to an input of a block."""

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""


class Entered(NamedTuple):
    """An input of a block.

    Attributes:
        path: of the block.
        link: the number of the block's link.
        number: of the input; ``None`` if it is the state.
    """

    path: str
    link: int
    number: int | None


class Handed(NamedTuple):
    """A state that was handed on.

    Attributes:
        state: as the model has it.
        hooks: its gradient hooks; the graph has them as long as itself, also where the model keeps no such tensor.
        seen: the same values, with the model's count of changes in place.
        version: that count, at first.
        apart: tensors of these values in the graphs of the blocks that do not share this count.
    """

    state: weakref.ref[Tensor]
    hooks: weakref.ref[OrderedDict[int, Any]]
    seen: Tensor
    version: int
    apart: list[Tensor]

    @classmethod
    def inside(cls, state: Tensor) -> Handed:
        """Return what there is of a state that the model does not get."""
        return cls(weakref.ref(state), _no_hooks, state, state._version, [])

    @classmethod
    def of(cls, state: Tensor) -> Handed:
        """Return what there is of an output of Exits."""
        hooks: OrderedDict[int, Any] = OrderedDict()
        # As Tensor.register_hook does for the first hook.
        state._backward_hooks = hooks
        state.grad_fn._register_hook_dict(state)  # type: ignore[union-attr]
        return cls(weakref.ref(state), weakref.ref(hooks), state.detach(), state._version, [])

    def filled(self, out: Tensor) -> Handed:
        """Return it where the output was empty and has been filled with ``out``."""
        self.seen.data = out
        self.apart.append(out)
        return self


_none: OrderedDict[int, Any] = OrderedDict()
_no_hooks = weakref.ref(_none)


class _Context(FunctionCtx):
    recording: Any
    index: int
    number: int
    path: str
    count: int
    entered: list[Entered]
    entries: list[Any]


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
        leaves = chain(([tensor] for tensor, _ in recording.inputs), recording.leaves())
        spare_hooks(t._backward_hooks for own, g in zip(leaves, gradients, strict=True) if g is None for t in own)
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
    """(pass, what enters, n, anchor, tensors) -> these without history, and n more like the first for other calls."""

    @staticmethod
    def forward(
        ctx: _Context,
        recording: Recorded,
        entered: list[Entered],
        more: int,
        anchor: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Remember what the outputs are: ``entered`` grows with the calls."""
        ctx.recording, ctx.entered, ctx.count = weakref.ref(recording), entered, len(tensors)
        ctx.set_materialize_grads(False)
        return *(t.detach() for t in tensors), *_empty_like(tensors[0], more)

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Hand on what left a block elsewhere than by its output; the engine's own passes come by here and end."""
        recording = ctx.recording()
        for entered, cotangent in zip(ctx.entered, cotangents, strict=False):
            if recording is None:
                raise ChainError(INSIDE_ALONE.format(path=entered.path))
            if cotangent is not None and not recording.solving:
                recording.collect_inside(entered, cotangent)
        return (None,) * (4 + ctx.count)


class Anchor(torch.autograd.Function):
    """(leaf tensors before the chain, parameters) -> what leads from all Entries to these.

    Autograd, asked for their gradients alone, must run the Entries, too. Start would do, were it not for the cycle from
    the graphs of the blocks over it and the recording to these graphs. h_0 would, but an engine that asks a block's
    graph for gradients of parameters that the graph before the chain has, too, would go through that.
    """

    @staticmethod
    def forward(ctx: _Context, *tensors: Tensor) -> Tensor:
        """Count them."""
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[None, ...]:
        """Return nothing."""
        return (None,) * ctx.count


class Aside(torch.autograd.Function):
    """(pass, link, number, the state behind it, tensor) -> that tensor, which the link returned beside its state."""

    @staticmethod
    def forward(ctx: _Context, recording: Recorded, index: int, number: int, state: Tensor, tensor: Tensor) -> Tensor:
        """Hand it on."""
        ctx.recording, ctx.index, ctx.number = recording, index, number
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, ...]:
        """Keep its cotangent."""
        ctx.recording.collect_aside(ctx.index, ctx.number, cotangent)
        return None, None, None, None, None


class Past(torch.autograd.Function):
    """(path, nodes of its inputs, the state or Start before, output) -> that output of a block that is no link."""

    @staticmethod
    def forward(ctx: _Context, path: str, entries: list[Any], before: Tensor, out: Tensor) -> Tensor:
        """Hand it on."""
        ctx.path, ctx.entries = path, entries
        ctx.set_materialize_grads(False)
        return out.clone()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[Cotangent, ...]:
        """Let autograd go on through the block, if it will come to its end."""
        if cotangent is not None and not all(map(torch._C._will_engine_execute_node, ctx.entries)):
            raise ChainError(
                f"torch.autograd.grad was asked for the gradient of what lies before {ctx.path}, and for no parameter: "
                "it does not get past that block, which autograd goes through by itself. Ask for gradients of "
                "parameters as well, or detach the engine."
            )
        return None, None, None, cotangent


START: Any = Start._backward_cls
EXITS: Any = Exits._backward_cls
ENTRIES: Any = Entries._backward_cls
ASIDE: Any = Aside._backward_cls
PAST: Any = Past._backward_cls
BORDERS = (START, EXITS, ENTRIES, ASIDE, PAST)
"""The classes of the nodes."""

INSIDE_ALONE = (
    "the loss uses a tensor from inside {path}, but no state of the chain that it lies in: its gradient cannot pass "
    "the chain then. Add it to the model's loss and call backward() once, return it from the block beside the state, "
    "or detach the engine for this pass."
)


def leading_to(tensors: Iterable[Tensor], known: Collection[int]) -> list[Tensor]:
    """Return what leads to the leaves of the tensors' graphs but for those ``known`` by id, and to no other node.

    Where a graph comes to a chain, that is its Anchor, which does so.
    """
    graph = walk(tensors, ends=(EXITS,))
    chains: list[Any] = [node for node, _ in graph.stops]
    return [*(leaf for leaf in graph.leaves if id(leaf) not in known), *(node.recording._anchor for node in chains)]


def leads_inside(loss: Tensor) -> bool:
    """Tell whether ``loss`` uses a tensor from inside a block, which the block has not returned beside its state."""
    return ENTRIES in walk([loss], ends=(PAST,)).kinds


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
