"""Nodes of autograd's graph where a pass comes from other ranks or leaves for them."""

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
    zeros: Sequence[Tensor]


class Arrived(torch.autograd.Function):
    """(what is given its cotangent, a tensor of another rank, an anchor) -> this tensor."""

    @staticmethod
    def forward(ctx: _Context, check: Callable[[Cotangent], None] | None, tensor: Tensor, anchor: Tensor) -> Tensor:
        """Return the tensor with this node behind it."""
        ctx.given = check
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, None, None]:
        """Check the cotangent; the engine sends it back."""
        if ctx.given is not None:
            ctx.given(cotangent)
        return None, None, None


class Sent(torch.autograd.Function):
    """(what is given the outputs' cotangents, n, which outputs need one, n sent states, outputs) -> outputs.

    Backward passes through an output reach the states that this rank has sent, with zeros: the engine itself asks for
    their cotangents.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        check: Callable[[Sequence[Cotangent]], None],
        count: int,
        needing: Sequence[bool],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs with this node behind them."""
        ctx.given = check
        ctx.zeros = [state.new_zeros(()).expand(state.shape) for state in tensors[:count]]
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors[count:])
        ctx.mark_non_differentiable(*(t for t, needed in zip(outputs, needing, strict=True) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[Cotangent, ...]:
        """Check the cotangents, and return those of the outputs as they are."""
        refuse_second_derivatives()
        ctx.given(cotangents)
        return None, None, None, *ctx.zeros, *cotangents


def anchor() -> Tensor:
    """Return a leaf that makes autograd record what is computed with it."""
    return torch.zeros((), requires_grad=True)
