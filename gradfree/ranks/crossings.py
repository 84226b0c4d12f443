"""Nodes of autograd's graph where a pass comes from, or goes on to, other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.algebra.cotangents import Cotangent
from gradfree.torchside.guards import refuse_second_derivatives


class _Context(FunctionCtx):
    given: Any
    like: list[tuple[Tensor, torch.Size]]
    outputs: int


class Arrived(torch.autograd.Function):
    """(what to do with its cotangent, tensor of another rank, others) -> that tensor, which needs a gradient.

    Backward passes that come by here go on to the others, with nothing for them.
    """

    @staticmethod
    def forward(ctx: _Context, send: Callable[[Cotangent], None] | None, tensor: Tensor, *others: Tensor) -> Tensor:
        """Hand it on."""
        ctx.given, ctx.outputs = send, len(others)
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, ...]:
        """Send its cotangent back, if the engine has not."""
        if ctx.given is not None:
            ctx.given(cotangent)
        return (None,) * (2 + ctx.outputs)


class Departed(torch.autograd.Function):
    """(what looks at their cotangents, how to get others, which need one, what has gone, outputs) -> these outputs.

    What the loss makes of the outputs is the affair of the last rank, which has computed them. Here they lead backward
    passes to this rank's chain.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        look: Callable[[Sequence[Cotangent]], None],
        takes: Sequence[Callable[[], Tensor] | None],
        needing: Sequence[bool],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Hand on the outputs."""
        gone, outputs = tensors[: len(takes)], tensors[len(takes) :]
        ctx.given, ctx.outputs = (look, takes), len(outputs)
        ctx.like = [(tensor.new_zeros(()), tensor.shape) for tensor in gone]
        return _handed(ctx, needing, outputs)

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[Cotangent, ...]:
        """Return the direct cotangents of what has gone: zero, where the engine itself asks for more."""
        refuse_second_derivatives()
        look, takes = ctx.given
        look(cotangents)
        pairs = zip(takes, ctx.like, strict=True)
        direct = [zero.expand(shape) if take is None else take() for take, (zero, shape) in pairs]
        return None, None, None, *direct, *(None,) * ctx.outputs


class HandedOut(torch.autograd.Function):
    """(what looks at their cotangents, which need one, how many states, last states, outputs) -> these outputs.

    On the last rank, whose chain every backward pass through an output must reach: other ranks wait for cotangents.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        look: Callable[[Sequence[Cotangent]], None],
        needing: Sequence[bool],
        states: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Hand on the outputs."""
        ctx.given, ctx.like = look, [(state.new_zeros(()), state.shape) for state in tensors[:states]]
        return _handed(ctx, needing, tensors[states:])

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[Cotangent, ...]:
        """Return those of the outputs, and zero for the states."""
        refuse_second_derivatives()
        ctx.given(cotangents)
        return None, None, None, *(zero.expand(shape) for zero, shape in ctx.like), *cotangents


class Shared(torch.autograd.Function):
    """(how to sum over ranks, parameters that several ranks use) -> the same, for one pass."""

    @staticmethod
    def forward(ctx: _Context, total: Callable[[list[Tensor]], Sequence[Tensor]], *parameters: Tensor) -> Any:
        """Hand them on."""
        ctx.given, ctx.like = total, [(p.detach(), p.shape) for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple(p.detach() for p in parameters)

    @staticmethod
    def backward(ctx: _Context, *gradients: Cotangent) -> tuple[Cotangent, ...]:
        """Return the sums of their gradients over the ranks that use them."""
        own = [torch.zeros_like(p) if g is None else g for (p, _), g in zip(ctx.like, gradients, strict=True)]
        return None, *ctx.given(own)


def _handed(ctx: _Context, needing: Sequence[bool], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a node's outputs, of which those that are ``needing`` a gradient lead to it."""
    ctx.set_materialize_grads(False)
    handed = tuple(tensor.detach() for tensor in outputs)
    ctx.mark_non_differentiable(*(t for t, needed in zip(handed, needing, strict=True) if not needed))
    return handed
