"""Nodes of autograd's graph around the calls of a cell in a loop.

As those of chains in depth (:mod:`gradfree.depth.borders`): *LoopStart*, before the first call, takes the initial
state, what the inputs of the calls are parts of or are computed with, and the parameters; *LoopExit*, behind each call,
hands the state on, and in the backward pass only keeps its direct cotangent. Autograd runs LoopStart last: there the
engine solves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree.algebra.cotangents import Cotangent
from gradfree.torchside.guards import refuse_second_derivatives
from gradfree.torchside.hooks import spare_hooks


class Looped(Protocol):
    """A recorded pass: what the nodes have to tell."""

    start: weakref.ref[Any]

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the state behind call ``index``, part by part."""

    def solve(self, saved: Any) -> Sequence[Cotangent]:
        """Return the gradients of all that LoopStart has taken."""


class _Context(FunctionCtx):
    recording: Any
    index: int
    hooks: Sequence[Any]


class LoopStart(torch.autograd.Function):
    """(pass, initial state, what inputs come from, parameters) -> what the first LoopExit continues from."""

    @staticmethod
    def forward(ctx: _Context, recording: Looped, *given: Tensor) -> Tensor:
        """Let the node know its pass."""
        ctx.recording = recording
        recording.start = weakref.ref(ctx)
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return given[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[Cotangent, ...]:
        """Return all gradients."""
        refuse_second_derivatives()
        gradients = ctx.recording.solve(ctx)
        given = ctx.recording.given()
        spare_hooks(tensor._backward_hooks for tensor, g in zip(given, gradients, strict=True) if g is None)
        return None, *gradients


class LoopExit(torch.autograd.Function):
    """(pass, call, LoopStart or the state before, the parts of a state) -> a guard, and these for the model."""

    @staticmethod
    def forward(ctx: _Context, recording: Looped, index: int, before: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        """Hand them on."""
        ctx.recording, ctx.index = recording, index
        ctx.set_materialize_grads(False)
        return parts[0].new_empty(0), *(part.detach() for part in parts)

    @staticmethod
    def backward(ctx: _Context, _: None, *cotangents: Cotangent) -> tuple[None, ...]:
        """Keep the direct cotangents."""
        ctx.recording.collect(ctx.index, cotangents)
        return (None,) * (3 + len(cotangents))


LOOP_EXIT: Any = LoopExit._backward_cls
LOOP_START: Any = LoopStart._backward_cls
