"""Autograd nodes at the borders between ranks: for tensors that arrive from another rank or are sent to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.algebra.cotangents import Cotangent
from gradfree.torchside.guards import refuse_second_derivatives


class _Context(FunctionCtx):
    check: Any
    zeros: Tensor


class Arrived(torch.autograd.Function):
    """(check, a tensor of another rank, an anchor) -> this tensor. ``check`` is called with its cotangent."""

    @staticmethod
    def forward(ctx: _Context, check: Callable[[Cotangent], None] | None, tensor: Tensor, anchor: Tensor) -> Tensor:
        """Return the tensor, detached."""
        ctx.check = check
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, None, None]:
        """Check the cotangent; the engine sends it to the other rank."""
        if ctx.check is not None:
            ctx.check(cotangent)
        return None, None, None


class Sent(torch.autograd.Function):
    """(check, which outputs need a gradient, the state that this rank has sent, outputs) -> outputs.

    ``check`` is called with the cotangents of the outputs. A backward pass from an output reaches the sent state, with
    zeros, so that the engine runs; it receives the real cotangent from the next rank.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        check: Callable[[Sequence[Cotangent]], None],
        needing: Sequence[bool],
        sent: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs, detached."""
        ctx.check = check
        ctx.zeros = sent.new_zeros(()).expand(sent.shape)
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(t for t, needed in zip(outputs, needing, strict=True) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[Cotangent, ...]:
        """Check the cotangents, and return those of the outputs unchanged."""
        refuse_second_derivatives()
        ctx.check(cotangents)
        return None, None, ctx.zeros, *cotangents


def anchor() -> Tensor:
    """Return a leaf that makes autograd record what is computed with it."""
    return torch.zeros((), requires_grad=True)
