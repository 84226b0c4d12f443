"""Whether what ``torch.compile`` makes of a chunk of steps has the results and gradients of the chunk itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gradfree.devices.hardware import product_rounding
from gradfree.torchside.graph import walk
from gradfree.torchside.guards import are_near
from gradfree.torchside.hooks import without_hooks
from gradfree.torchside.private import next_sequence_number, sequence_number
from gradfree.torchside.random_state import RandomState


def agrees(
    compiled: Callable[..., Any], chunk: Callable[..., Any], step: Any, carry: Sequence[Tensor], xs: Sequence[Tensor]
) -> bool:
    """Return whether a compiled chunk has the results and gradients of the chunk itself, up to rounding."""
    carry, xs = ([t.detach().requires_grad_(t.requires_grad) for t in part] for part in (carry, xs))
    # Weights that an earlier call has cast would be tensors from outside.
    torch.clear_autocast_cache()
    start = next_sequence_number()
    try:
        with RandomState().restored():  # Compilation draws random numbers.
            with _Taken() as taken:
                expected = _results(chunk, step, carry, xs)
            found = _results(compiled, step, carry, xs)
            same = _are_same(found, expected)
            if not same or start == inf:
                return same
            leaves, edges = _inputs(expected, start)
            with _unobserved([*leaves, *taken.tensors.values()]):
                of_found, of_expected = (_gradients(outputs, [*leaves, *edges]) for outputs in (found, expected))
    except UnboundLocalError:  # Where torch 2.13 fuses loops, compiled code may use gradients before they are made.
        return False
    except RuntimeError as error:  # Some code in C++ fails when it is called.
        if type(error) is not RuntimeError:
            raise
        return False
    return _are_same(of_found, of_expected)


class _Taken(TorchFunctionMode):
    """Notes, by their ids, the tensors with a graph that functions of torch take."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        self.tensors.update((id(t), t) for t in given if t.grad_fn is not None)
        return func(*args, **(kwargs or {}))


@contextmanager
def _unobserved(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Keep gradients that are only compared from hooks on ``tensors``, and from ``retain_grad``."""
    grads = [(t, t.grad) for t in tensors if t.retains_grad]
    try:
        with without_hooks(tensors):
            yield
    finally:
        for t, grad in grads:
            t.grad = grad


def _results(run: Callable[..., Any], step: Any, carry: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    after, ys = run(step, carry, xs)
    return [*after, *ys]


def _inputs(outputs: Sequence[Tensor], start: float) -> tuple[list[Tensor], list[GradientEdge]]:
    """Return the leaves that ``outputs`` depend on, and the edges to the nodes with a number below ``start``."""
    earlier = {node for node in walk(outputs).nodes if sequence_number(node) < start}
    reached = walk(outputs, earlier)
    return reached.leaves, [GradientEdge(node, number) for node, number in reached.stops]


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of leaves and edges, of a function of all outputs; ``None``: there is none."""
    live = [t for t in outputs if t.requires_grad]
    if not live or not inputs:
        return [None for _ in inputs]
    given = [1 + t.detach() for t in live]
    # An earlier node may lie before a leaf that the step takes, too: its graph is needed again.
    return list(torch.autograd.grad(live, inputs, given, retain_graph=True, allow_unused=True))


def _are_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    return all(_is_same(a, b) for a, b in zip(found, expected, strict=True))


def _is_same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        # No gradient is as good as zeros.
        return not any(t is not None and t.any() for t in (found, expected))
    if not expected.numel() or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    rounding = max(torch.finfo(expected.dtype).eps, product_rounding(expected.device, expected.dtype))
    return bool(are_near(found, expected, rounding**0.5))
