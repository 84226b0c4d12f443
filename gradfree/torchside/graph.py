"""Reading autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node


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


def older(nodes: Iterable[Node], than: Node) -> bool:
    """Tell whether some of ``nodes`` were there before a node: they are no part of what was computed since."""
    return any(node._sequence_nr() < than._sequence_nr() for node in nodes)


def may_write(nodes: Iterable[Node]) -> bool:
    """Tell whether a custom function is among ``nodes``: it may change the cotangent that it is given in place."""
    return any(isinstance(node, BackwardCFunction) for node in nodes)
