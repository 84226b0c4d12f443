"""Whether what ``torch.compile`` makes of a chunk of steps has the results and gradients of the chunk itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

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
    start = next_sequence_number()
    try:
        with RandomState().restored():  # Compilation draws random numbers.
            expected, found = ([*after, *ys] for after, ys in (run(step, carry, xs) for run in (chunk, compiled)))
            same = _are_same(found, expected)
            if not same or start == inf:
                return same
            leaves, edges = _inputs(expected, start)
            with without_hooks(leaves):
                of_found, of_expected = (_gradients(outputs, [*leaves, *edges]) for outputs in (found, expected))
    except UnboundLocalError:  # Where torch 2.13 fuses loops, compiled code may use gradients before they are made.
        return False
    return _are_same(of_found, of_expected)


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
    return bool(are_near(found, expected, torch.finfo(expected.dtype).eps ** 0.5))
