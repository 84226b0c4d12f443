"""The nodes of autograd's graph that a recorded pass puts at the borders of its blocks.

- *Start*, before the first block, takes the initial state and every parameter that the chain may train. Autograd runs
  it last, when every direct cotangent is known: it lets the engine solve and returns all gradients.
- *Entry*, before each block and for each of its inputs, gives it a tensor without history: the block builds a graph of
  its own. Its backward runs only for what left the block elsewhere than by its output, such as a loss inside it.
- *Exit*, behind each block, hands the state on. Its backward only collects the direct cotangent e_i.
- *Aside*, one for each other tensor that the block returns, does the same for that.
- *Past*, behind a block that cannot be a link, leaves its graph to autograd.
"""
# ruff: noqa: D101, D102 -- of each node the above says what it does; its two methods are autograd's.

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.algebra.cotangents import Cotangent
from gradfree.errors import ChainError
from gradfree.torchside.guards import refuse_second_derivatives
from gradfree.torchside.hooks import spare_hooks


class Recorded(Protocol):
    """What the nodes know of the recorded pass that they belong to."""

    chain: Any
    solving: bool

    def started(self, node: Any) -> None:
        """Remember the Start node."""

    def collect(self, index: int, beside: int | None, cotangent: Cotangent) -> None:
        """Keep the cotangent of a link's state, or of what it returned beside it."""

    def collect_inside(self, index: int, number: int | None, cotangent: Cotangent) -> None:
        """Keep what came back to the state that a link was given, or to one of its other inputs."""

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of what Start was given."""

    def given(self) -> list[Tensor]:
        """Return what Start was given besides the initial state."""


class _Context(FunctionCtx):
    recording: Any
    index: int
    number: int | None
    path: str
    entries: list[Any]
    count: int


class Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, recording: Recorded, state: Tensor, *inputs_and_parameters: Tensor) -> Tensor:
        ctx.recording = recording
        recording.started(ctx)
        ctx.set_materialize_grads(False)
        # Only for the order of the nodes. Not the state itself: of whole numbers (tokens) it would need no gradient.
        return state.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[Cotangent, ...]:
        refuse_second_derivatives()
        initial, *gradients = ctx.recording.solve()
        spare_hooks(tensor for tensor, g in zip(ctx.recording.given(), gradients, strict=True) if g is None)
        return None, initial, *gradients


class Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, recording: Recorded, index: int, before: Tensor, state: Tensor) -> Tensor:
        ctx.recording, ctx.index = recording, index
        ctx.set_materialize_grads(False)
        return state.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, ...]:
        ctx.recording.collect(ctx.index, None, cotangent)
        return None, None, None, None


class Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, recording: Recorded, index: int, number: int, state: Tensor, original: Tensor) -> Tensor:
        ctx.recording, ctx.index, ctx.number = recording, index, number
        ctx.set_materialize_grads(False)
        return original.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, ...]:
        ctx.recording.collect(ctx.index, ctx.number, cotangent)
        return None, None, None, None, None


class Anchor(torch.autograd.Function):
    """Leads from every Entry to the parameters: autograd, asked for their gradients alone, must run the Entry, too.

    Start would do, were it not for the cycle from the graphs of the blocks over it and the recording to these graphs.
    """

    @staticmethod
    def forward(ctx: _Context, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[None, ...]:
        return (None,) * ctx.count


class Entry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        recording: weakref.ref[Recorded],
        path: str,
        index: int,
        number: int | None,
        anchor: Tensor,
        x: Tensor,
    ) -> Tensor:
        ctx.recording, ctx.path, ctx.index, ctx.number = recording, path, index, number
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, ...]:
        recording = ctx.recording()
        if recording is None:
            raise ChainError(INSIDE_ALONE.format(path=ctx.path))
        # The engine's own passes, which ask for parameters, come by here and end here.
        if not recording.solving:
            recording.collect_inside(ctx.index, ctx.number, cotangent)
        return (None,) * 6


class Past(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, path: str, entries: list[Any], before: Tensor, out: Tensor) -> Tensor:
        ctx.path, ctx.entries = path, entries
        ctx.set_materialize_grads(False)
        return out.clone()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[Cotangent, ...]:
        if cotangent is not None and not all(map(torch._C._will_engine_execute_node, ctx.entries)):
            raise ChainError(
                f"torch.autograd.grad was asked for the gradient of what lies before {ctx.path}, and for no parameter: "
                "it does not get past that block, which autograd goes through by itself. Ask for gradients of "
                "parameters as well, or detach the engine."
            )
        return None, None, None, cotangent


INSIDE_ALONE = (
    "the loss uses a tensor from inside {path}, but no state of the chain that it lies in: its gradient cannot pass "
    "the chain then. Add it to the model's loss and call backward() once, return it from the block beside the state, "
    "or detach the engine for this pass."
)

exit_node: Any = Exit._backward_cls
aside_node: Any = Aside._backward_cls
entry_node: Any = Entry._backward_cls
own_nodes: Any = tuple(f._backward_cls for f in (Start, Entry, Exit, Aside, Past))
