"""Nodes of autograd's graph where a pass comes from other ranks or leaves for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.algebra.cotangents import Cotangent
from gradfree.torchside.guards import refuse_second_derivatives
from gradfree.torchside.private import node_class


class _Context(FunctionCtx):
    given: Any
    needs_input_grad: tuple[bool, ...]


class Arrived(torch.autograd.Function):
    """(what to do with their cotangents, n, n tensors of another rank, others) -> these tensors.

    A backward pass through this node also reaches the nodes of the others, with no gradient for them.
    """

    @staticmethod
    def forward(
        ctx: _Context, send: Callable[[Sequence[Cotangent]], None] | None, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tensors with this node behind them."""
        ctx.given = send
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[None, ...]:
        """Send the cotangents back, if the engine has not."""
        if ctx.given is not None:
            ctx.given(cotangents)
        return (None,) * len(ctx.needs_input_grad)


class Sent(torch.autograd.Function):
    """(what returns cotangents of the sent, n, which outputs need one, n sent tensors, outputs) -> outputs.

    Backward passes through an output reach what this rank has sent to others, whose cotangents come from there.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        returned: Callable[[Sequence[Cotangent]], Sequence[Cotangent]],
        count: int,
        needing: Sequence[bool],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the outputs with this node behind them."""
        ctx.given = returned
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in tensors[count:])
        ctx.mark_non_differentiable(*(t for t, needed in zip(outputs, needing, strict=True) if not needed))
        return outputs

    @staticmethod
    def backward(ctx: _Context, *cotangents: Cotangent) -> tuple[Cotangent, ...]:
        """Return the cotangents of the sent, and those of the outputs as they are."""
        refuse_second_derivatives()
        return None, None, None, *ctx.given(cotangents), *cotangents


ARRIVED = node_class(Arrived)
"""The class of the nodes behind tensors of other ranks."""


def anchor() -> Tensor:
    """Return a leaf that makes autograd record what is computed with it."""
    return torch.zeros((), requires_grad=True)
