"""Reading autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import Node

from gradfree.chain import ChainError


class Reached(NamedTuple):
    """What a graph consists of.

    Attributes:
        stops: the nodes at which the walk was told to stop.
        leaves: the leaf tensors that need a gradient.
        nodes: all others.
    """

    stops: set[Node]
    leaves: list[Tensor]
    nodes: set[Node]


def walk(outputs: Iterable[Tensor], stops: Collection[Node] = ()) -> Reached:
    """Return everything that ``outputs`` were computed from, up to ``stops``."""
    outputs = list(outputs)
    reached = Reached(set(), [out for out in outputs if out.is_leaf and out.requires_grad], set())
    stack: list[Any] = [out.grad_fn for out in outputs]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in stops:
            reached.stops.add(node)
        elif node.name() == "torch::autograd::AccumulateGrad":
            reached.leaves.append(node.variable)
        else:
            reached.nodes.add(node)
            stack.extend(n for n, _ in node.next_functions)
    return reached


def may_write(nodes: Iterable[Node]) -> bool:
    """Tell whether a custom function is among ``nodes``: it may change the cotangent that it is given in place."""
    return any(isinstance(node, BackwardCFunction) for node in nodes)


def refuse_second_derivatives() -> None:
    """Raise if the running backward pass records a graph of its own, ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise ChainError(
            "create_graph=True: an engine's gradients have no derivatives of their own. Detach the handle for the "
            "passes that need second derivatives (gradient penalties)."
        )


def saved(ctx: FunctionCtx, where: str) -> tuple[Tensor, ...]:
    """Return what the forward pass of ``where`` has saved.

    Raises:
        ChainError: some of it was changed in place since.
    """
    try:
        return ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise ChainError(
            f"the input, the initial state, the weights or the output of {where} were changed in place between the "
            "forward and the backward pass, which needs them. Use the out-of-place operation (out = out + x, not "
            "out += x), and step the optimizer after the backward pass."
        ) from error


def check_finite(cotangents: Iterable[Tensor | None], where: str) -> None:
    """Under anomaly detection, refuse NaN and inf at the output of ``where``.

    Elsewhere they pass: GradScaler must see them, and to look costs a host sync.
    """
    if torch.is_anomaly_enabled() and not _finite(cotangents):
        raise ChainError(f"non-finite cotangent at the output of {where}: NaN or inf comes from behind it.")


def check_made_finite(gradients: Iterable[Tensor | None], where: str) -> None:
    """Under anomaly detection, refuse NaN and inf that ``where`` itself made of finite cotangents."""
    if torch.is_anomaly_enabled() and not _finite(gradients):
        raise ChainError(
            f"non-finite gradient in {where}: NaN or inf is in its input, its initial state or its weights, or an "
            "overflow made it."
        )


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(t is None or bool(t.isfinite().all()) for t in tensors)


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Keep tensor hooks on parameters from running here: autograd runs them when the gradient arrives."""
    hooked = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)


def spare_hooks(tensors: Iterable[Tensor]) -> None:
    """Until the running backward pass ends, keep hooks on ``tensors`` from being called with no gradient.

    Autograd calls a hook with ``None`` where a function returns that; a tensor that it does not reach has no call.
    """
    hooked = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]

    def restore() -> None:
        for hooks, saved in hooked:
            hooks.update({key: hook for key, hook in saved.items() if key in hooks})

    for hooks, saved in hooked:
        hooks.update({key: partial(_unless_none, hook) for key, hook in saved.items()})
    if hooked:
        torch.autograd.Variable._execution_engine.queue_callback(restore)


def _unless_none(hook: Callable[[Tensor], Tensor | None], grad: Tensor | None) -> Tensor | None:
    return None if grad is None else hook(grad)
