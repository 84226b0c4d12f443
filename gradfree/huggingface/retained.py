"""Losses on tensors from inside blocks, whose graphs the Trainer does not ask autograd to retain."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.depth.nodes import leads_inside


class _Context(FunctionCtx):
    loss: Tensor


class Retained(torch.autograd.Function):
    """(a leaf, [loss]) -> the loss; its backward pass goes through the loss's graph by itself and retains that.

    A list hides the loss from autograd. The graph is freed with the loss.
    """

    @staticmethod
    def forward(ctx: _Context, leaf: Tensor, hidden: list[Tensor]) -> Tensor:
        """Keep the loss."""
        (ctx.loss,) = hidden
        return ctx.loss.detach().clone()

    @staticmethod
    def backward(ctx: _Context, cotangent: Tensor) -> tuple[None, None]:
        """Write the gradients."""
        torch.autograd.backward(ctx.loss, cotangent, retain_graph=True)
        return None, None


def retain(out: Any) -> None:
    """Let the loss that a model returns retain its graph, if it uses a tensor from inside a block of a chain."""
    loss = out.get("loss") if isinstance(out, MutableMapping) else None
    if isinstance(loss, Tensor) and loss.requires_grad and leads_inside(loss):
        out["loss"] = Retained.apply(loss.new_empty(0).requires_grad_(), [loss])
