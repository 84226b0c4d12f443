"""Walks autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from gradfree.torchside.private import LEAF, function_of


class Reached(NamedTuple):
    """The result of a walk through a graph.

    Attributes:
        stops: the nodes at which the walk stopped, each with the number of the output by which it was reached.
        leaves: the leaf tensors that need a gradient.
        nodes: all other nodes.
        kinds: the classes of ``nodes``.
    """

    stops: set[tuple[Node, int]]
    leaves: list[Tensor]
    nodes: list[Node]
    kinds: set[type]


def walk(outputs: Iterable[Tensor], stops: Collection[Node] = (), ends: tuple[type, ...] = ()) -> Reached:
    """Walk back from ``outputs``, up to the nodes ``stops`` and to nodes of the classes ``ends``."""
    roots = [out for out in outputs if out.requires_grad]
    leaves = [out for out in roots if out.is_leaf]
    found: list[Any] = [(out.grad_fn, out.output_nr) for out in roots]
    nodes: list[Any] = []
    seen: set[Any] = {None}
    stopped: set[tuple[Any, int]] = set()
    kinds: set[type] = set()
    for pair in found:
        node = pair[0]
        if node in seen:
            continue
        kind = type(node)
        if kind is LEAF:
            seen.add(node)
            leaves.append(node.variable)
        elif kind in ends or node in stops:
            stopped.add(pair)
        else:
            seen.add(node)
            nodes.append(node)
            kinds.add(kind)
            found += node.next_functions
    return Reached(stopped, leaves, nodes, kinds)


def operations(outputs: Iterable[Tensor], given: Iterable[Tensor]) -> Hashable:
    """Return what ``outputs`` are computed by: a value that is equal for graphs of the same operations on ``given``.

    Two runs of a function may have equal values and other gradients, such as with ``x.detach()`` in one of them.

    Args:
        outputs: tensors, with their graphs.
        given: tensors at which the walk ends; only those that need a gradient count.
    """
    ends: dict[Any, int] = {t if t.is_leaf else t.grad_fn: n for n, t in enumerate(given) if t.requires_grad}
    places: dict[Any, int | None] = {None: None}
    nodes: list[Any] = []

    def place(node: Any) -> Hashable:
        known = ends.get(node.variable if type(node) is LEAF else node)
        if known is not None:
            return "given", known
        if node not in places:
            places[node] = len(nodes)
            nodes.append(node)
        return places[node]

    roots = [get_gradient_edge(out) if out.requires_grad else None for out in outputs]
    found: list[Hashable] = [None if root is None else (place(root.node), root.output_nr) for root in roots]
    found += [(type(node), *((place(before), number) for before, number in node.next_functions)) for node in nodes]
    return tuple(found)


def has_custom_functions(kinds: Iterable[type]) -> bool:
    """Return whether nodes of custom functions are among the classes: these may write to their cotangent."""
    return any(issubclass(kind, BackwardCFunction) for kind in kinds)


def foreign_functions(kinds: Iterable[type]) -> list[str]:
    """Return the names of the custom functions among the classes of nodes that are not torch's own."""
    return sorted(function_of(kind).__name__ for kind in kinds if is_foreign(kind))


def is_foreign(kind: type) -> bool:
    """Return whether a class of nodes is that of a custom function that is not torch's own."""
    return issubclass(kind, BackwardCFunction) and function_of(kind).__module__.partition(".")[0] != "torch"
