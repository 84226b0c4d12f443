"""Where the inputs of a cell's calls come from, and the way of their gradients back to there.

The node that returns gradients is made before the first call, when the inputs of the later ones are not there yet. So
these must be constants, parts of a tensor that the first one is a part of, too (``x[:, t]``), or computed from such
leaves (parameters) as the first one is, or from the states of another loop, as in a stack of cells.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.borders import BORDERS
from gradfree.errors import ChainError
from gradfree.loops.loop_nodes import LOOP_EXIT, LOOP_START
from gradfree.torchside.graph import LEAF
from gradfree.torchside.hooks import without_hooks

_VIEWS = (
    "AliasBackward0",
    "PermuteBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
)
"""Operations whose gradient is put where the part has been taken from, and that have no part overlap with itself."""

_NODES = 64
"""How many operations an input may be behind its leaves: more are not the step's own."""


class Seen(NamedTuple):
    """What an input is computed from.

    Attributes:
        leaves: leaf tensors that need a gradient.
        states: of other loops, by node and number of its output.
        nodes: the operations.
    """

    leaves: list[Tensor]
    states: list[tuple[Any, int]]
    nodes: set[Any]


class _Taken(NamedTuple):
    """The input of a call: ``part`` of the root, or computed from what is ``seen``; or else a constant, or the root."""

    x: Tensor
    version: int
    part: bool
    seen: Seen | None


class LoopInputs:
    """The inputs of the calls of one pass.

    Args:
        first: that of the first call.
        path: what the loop is called in messages.

    Attributes:
        path: likewise.
        root: the tensor that the first input is a part of, or itself; ``None`` if it needs no gradient.
        leaves: what it is computed from, as far as that is near.
        taken: the inputs so far.
    """

    def __init__(self, first: Tensor, path: str):
        self.first, self.path = first, path
        self.root: Tensor | None = None
        self.leaves: list[Tensor] = []
        self.taken: list[_Taken] = []
        self._others: set[Any] = set()
        self._nodes: set[Any] = set()
        self._since = 0
        if first.requires_grad:
            base = first._base
            self.root = base if base is not None and _is_part(first, base) else first
            self._edge, self._version = get_gradient_edge(self.root), self.root._version
            seen = computed_from(first)
            if seen is not None:
                self.leaves = seen.leaves
                self._others = {node.recording for node, _ in seen.states}
                self._nodes = seen.nodes

    @property
    def given(self) -> list[Tensor]:
        """What LoopStart takes for them."""
        return self.leaves if self.root is None else [self.root, *self.leaves]

    def take(self, x: Tensor) -> str | None:
        """Take the input of another call; return why that cannot be, ``None`` if it can."""
        if x.shape != self.first.shape or x.dtype is not self.first.dtype or x.device != self.first.device:
            return "its input has another shape, dtype or device than in the call before"
        part, seen = False, None
        if x.requires_grad and not (x is self.root and self._root_is_as_it_was()):
            part = self.root is not None and _is_part(x, self.root) and self._root_is_as_it_was()
            if not part:
                if x._base is not None and x._base.numel() > x.numel():
                    return "its input is a part of another tensor than that of the first call"
                seen = computed_from(x, self._since, self._nodes)
                if seen is None:
                    return "its input depends on a state of the loop, or on what was computed before the last call"
                leaves = set(map(id, self.leaves))
                if any(id(leaf) not in leaves for leaf in seen.leaves):
                    return "its input is computed from a tensor that the first call's was not"
                if any(node.recording not in self._others for node, _ in seen.states):
                    return "its input depends on a state that the first call's did not"
        self.taken.append(_Taken(x, x._version, part, seen))
        self._since = torch._C._autograd._get_sequence_nr()
        return None

    def _root_is_as_it_was(self) -> bool:
        assert self.root is not None
        now = get_gradient_edge(self.root)
        same = (now.node, now.output_nr) == (self._edge.node, self._edge.output_nr)
        return same and self.root._version == self._version

    def refuse(self) -> None:
        """Refuse inputs that were changed, or that somebody looks at the gradient of, since their calls."""
        for x, version, part, seen in self.taken:
            if x._version != version:
                raise ChainError(
                    f"an input of {self.path} was changed in place since its call, and the backward pass needs it. Use "
                    "the out-of-place operation."
                )
            if (part or seen is not None) and (x._backward_hooks or x.retains_grad):
                raise ChainError(
                    f"an input of {self.path} has got a gradient hook or retain_grad() since its call: it would not "
                    "see its whole gradient. Register it before, or remove it."
                )

    def back(self, gradients: Sequence[Tensor]) -> list[Cotangent]:
        """Return the gradients of :attr:`given`, and give states of other loops theirs.

        Args:
            gradients: of the inputs of the first calls, as many as the loss has reached.
        """
        root: Cotangent = None
        behind: list[tuple[_Taken, Tensor]] = []
        for n, (taken, gradient) in enumerate(zip(self.taken, gradients, strict=False)):
            x = taken.x
            if taken.part:
                assert self.root is not None
                root = torch.zeros_like(self.root) if root is None else root
                offset = x.storage_offset() - self.root.storage_offset()
                root.as_strided(x.shape, x.stride(), offset).add_(gradient)
            elif x is self.root:
                root = gradient.clone() if root is None else root.add_(gradient)
            elif x.requires_grad:
                assert taken.seen is not None, n
                behind.append((taken, gradient))
        of_leaves: list[Cotangent] = self._through(behind) if behind else [None] * len(self.leaves)
        return of_leaves if self.root is None else [root, *of_leaves]

    def _through(self, behind: Sequence[tuple[_Taken, Tensor]]) -> list[Cotangent]:
        """Pull gradients of inputs back through what their calls' own operations have computed them with."""
        states = list(dict.fromkeys(state for taken, _ in behind if taken.seen for state in taken.seen.states))
        for recording in self._others:
            recording.asked = True
        try:
            with without_hooks(self.leaves):
                pulled = torch.autograd.grad(
                    [taken.x for taken, _ in behind],
                    [*self.leaves, *(GradientEdge(node, number) for node, number in states)],  # type: ignore[arg-type]
                    [g.clone() for _, g in behind],
                    # The model may use them elsewhere, too, and autograd come there later.
                    retain_graph=True,
                    allow_unused=True,
                )
        except RuntimeError as error:
            if "a second time" not in str(error):
                raise
            raise ChainError(
                f"what the inputs of {self.path} are computed with is used elsewhere in the loss, too, and freed "
                "already: call backward(retain_graph=True), or compute the inputs of all calls at once before the loop."
            ) from error
        finally:
            for recording in self._others:
                recording.asked = False
        for (node, number), g in zip(states, pulled[len(self.leaves) :], strict=True):
            if g is not None:
                node.recording.receive(node.index, number - 1, g)
        return list(pulled[: len(self.leaves)])


def _is_part(x: Tensor, root: Tensor) -> bool:
    """Tell whether ``x`` is a plain view of ``root``, whose gradient lies where it has been taken from."""
    if x._base is not root or not root.is_contiguous() or x.dtype is not root.dtype or x._backward_hooks:
        return False
    edge = get_gradient_edge(root)
    node, number = x.grad_fn, x.output_nr
    for _ in range(8):
        if node is edge.node:
            return number == edge.output_nr
        if node is None or node.name() not in _VIEWS:
            return False
        node, number = node.next_functions[0]
    return False


def computed_from(x: Tensor, since: int = 0, shared: Container[Any] = ()) -> Seen | None:
    """Return what ``x`` is computed from; ``None`` if that is too far away, or cannot be gone through by itself.

    Args:
        x: a tensor that needs a gradient.
        since: the number of the first node that autograd may have made for it: older ones may be others' as well, and
            be freed when they are needed.
        shared: older ones that may not: autograd comes to what the first input is computed from when all is done.
    """
    leaves: dict[int, Tensor] = {}
    states: dict[tuple[Any, int], None] = {}
    nodes: set[Any] = set()
    stack: list[Any] = [(x.grad_fn, x.output_nr)]

    def own(node: Any) -> bool:
        return node._sequence_nr() >= since or node in shared

    if x.grad_fn is None:
        return Seen([x], [], set())
    while stack:
        node, number = stack.pop()
        if node is None or node in nodes:
            continue
        if isinstance(node, LOOP_EXIT):
            states[node, number] = None
        elif type(node) is LEAF:
            leaves[id(node.variable)] = node.variable
        elif len(nodes) == _NODES or isinstance(node, (LOOP_START, *BORDERS, _REENTRANT)) or not own(node):
            return None
        else:
            nodes.add(node)
            stack.extend(node.next_functions)
    return Seen(list(leaves.values()), list(states), nodes)


_REENTRANT: type = CheckpointFunction._backward_cls
