"""Reading autograd's graph."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge

LEAF: Any = type(torch.ones(1, requires_grad=True).view(1).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
"""The class of nodes that stand for leaf tensors."""


class Reached(NamedTuple):
    """What a graph consists of.

    Attributes:
        stops: the nodes at which the walk was told to stop, and by which of their outputs it came there.
        leaves: the leaf tensors that need a gradient.
        nodes: all others.
        kinds: the classes of those.
    """

    stops: set[tuple[Node, int]]
    leaves: list[Tensor]
    nodes: set[Node]
    kinds: set[type]


def walk(outputs: Iterable[Tensor], stops: Collection[Node] = (), ends: tuple[type, ...] = ()) -> Reached:
    """Return everything that ``outputs`` were computed from, up to ``stops`` and to nodes of the classes ``ends``."""
    outputs = list(outputs)
    leaves = [out for out in outputs if out.is_leaf and out.requires_grad]
    nodes: set[Any] = set()
    seen: set[Any] = {None}
    stopped: set[tuple[Any, int]] = set()
    stack: list[Any] = [(out.grad_fn, out.output_nr) for out in outputs]
    while stack:
        node, index = stack.pop()
        if node in stops or type(node) in ends:
            stopped.add((node, index))
        elif node not in seen:
            seen.add(node)
            if type(node) is LEAF:
                leaves.append(node.variable)
            else:
                nodes.add(node)
                stack.extend(node.next_functions)
    return Reached(stopped, leaves, nodes, set(map(type, nodes)))


def has_left(output: Tensor, leaf: Tensor) -> bool:
    """Tell whether ``output`` was computed from ``leaf`` when that had another dtype or device: torch forgets that."""
    nodes = {node for inner in walk([output]).nodes for node, _ in inner.next_functions if type(node) is LEAF}
    return any(node.variable is leaf and node is not get_gradient_edge(leaf).node for node in nodes)  # type: ignore[union-attr]


def older(nodes: Iterable[Node], number: int) -> bool:
    """Tell whether some of ``nodes`` were there when autograd was about to give a node that ``number``."""
    return any(node._sequence_nr() < number for node in nodes)


def may_write(kinds: Iterable[type]) -> bool:
    """Tell whether custom functions are among the classes of nodes: they may write to the cotangent that they get."""
    return any(issubclass(kind, BackwardCFunction) for kind in kinds)


def is_reached(leaf: Tensor) -> bool:
    """Tell whether the running backward pass computes the gradient of a leaf tensor."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # Which says that torch.autograd.grad is asked for it.
        return True


def asked_for() -> Iterator[tuple[Any, int]]:
    """Yield node and number of what a running ``torch.autograd.grad`` was asked for, but for leaf tensors.

    No node tells, but the call does. Nodes of other devices are run by autograd's own threads: there any thread's call
    may be the one.
    """
    own = _running_backward(sys._getframe())
    for call in [own] if own else map(_running_backward, sys._current_frames().values()):
        for asked in call.f_locals["args"][3] if call else ():
            if isinstance(asked, GradientEdge):
                yield asked.node, asked.output_nr
            elif asked.grad_fn is not None:
                yield asked.grad_fn, asked.output_nr


def _running_backward(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    return frame


def keeps_graph() -> bool:
    """Tell whether the running backward pass was called with ``retain_graph=True``."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()
