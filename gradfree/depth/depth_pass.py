"""One forward pass through a chain in depth: what it records, and how ``loss.backward()`` solves it.

Forward, for each block (:class:`~gradfree.depth.recorder.BlockRecorder`, the nodes of :mod:`~gradfree.depth.nodes`):

1. *Before it runs*, its state tells by its graph node which pass it belongs to; any other state begins a pass, with a
   Start node in the graph. The block is given the state without history, by an Entry.
2. *The block runs* as always, and so makes a graph of its own that ends at its Entry.
3. *Behind it*, that graph is walked once: for the parameters that it leads to, and to refuse what is not the chain's.
   The graph becomes a :class:`~gradfree.depth.link.Link` of the pass. The model gets the output behind an Exit.

Backward, in one call of ``loss.backward()``:

4. Autograd runs every Exit, and the Entries that the loss leads to: they collect the direct cotangents e_i.
5. Autograd runs Start last. The pass refuses what neither autograd nor the nodes see, and linearises the links to a
   :class:`~gradfree.depth.depth_chain.DepthChain`. The engine solves it: its pulls and parameter gradients are calls of
   ``torch.autograd.grad`` on the blocks' own graphs.
6. Start returns all gradients to autograd, which adds them to ``.grad`` as it does with any others.

With ``retain_graph=True`` the chain may be solved again, by another backward pass; otherwise the links are freed, and
what arrives later raises. Nothing of a pass is kept on the modules: passes may overlap and run in several threads, and
a model may be called several times before one backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradfree.algebra.cotangents import Cotangent, plus
from gradfree.chains.chain import ChainGradients
from gradfree.depth.depth_chain import Attached, DepthChain, Trained
from gradfree.depth.link import Link, add_inside, added, check_untouched, pull_extra
from gradfree.depth.nodes import EXIT, INSIDE_ALONE, Anchor, Entry, Exit, Start
from gradfree.errors import ChainError
from gradfree.torchside.graph import walk
from gradfree.torchside.guards import check_finite, refuse_batched
from gradfree.torchside.private import asked_for, backward_id, keeps_graph, will_run


class DepthPass:
    """One forward pass through a chain, and its backward passes.

    Args:
        chain: what is recorded.
        trained: the parameters that may be trained in it.
        inputs: the tensors that need a gradient and that the first block is given beside its state.

    Attributes:
        of: the chain, weakly.
        anchor: what entries lead to: the parameters, and the leaves before the chain.
        numbers: the places of the parameters, by their ids.
        links: the blocks that have run.
        solving: whether the engine solves the chain at the moment.
    """

    def __init__(self, chain: Attached, trained: Trained, inputs: Sequence[Tensor]):
        # A state may be kept on a module that the chain leads to: solve() lets go of the chain.
        self.chain, self.of = chain, weakref.ref(chain)
        self.parameters, self.numbers, self.anchor = trained
        self.inputs = [(tensor, get_gradient_edge(tensor)) for tensor in inputs]
        self.links: list[Link] = []
        self.solving = False
        self.start: weakref.ref[Any]
        self._ref = weakref.ref(self)
        self._backward, self._freed, self._solved = -1, False, False
        self._direct: list[Cotangent] = []
        self._extra: dict[tuple[int, int], Tensor] = {}
        self._inside: list[tuple[int, int | None, Tensor]] = []
        self._lock = Lock()

    def begin(self, state: Tensor) -> Tensor:
        """Put the Start node behind ``state``, h_0; return what the first Exit is to continue from."""
        tensors = [tensor for tensor, _ in self.inputs]
        if before := _leading_before([state, *tensors]):
            self.anchor = Anchor.apply(self.anchor, *before)
        return Start.apply(self, state, *tensors, *self.parameters)

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Check or keep what is needed of ``block``, which is about to run on ``state``; nothing here."""

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor among the inputs of the pass."""
        edge = get_gradient_edge(tensor)
        for n, (known, before) in enumerate(self.inputs):
            # A change in place gives the same tensor another history. The edges may be different objects.
            if tensor is known and (edge.node, edge.output_nr) == (before.node, before.output_nr):
                return n
        return None

    def enter(self, path: str, numbers: Sequence[int | None], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return ``tensors`` without history, for the block at ``path``; ``numbers`` as :class:`Entry` has them."""
        if not tensors:
            return ()
        entered: Sequence[Tensor] = Entry.apply(self._ref, len(self.links), path, numbers, self.anchor, tensors)
        return entered

    def leave(self, link: Link, before: Tensor) -> Sequence[Tensor]:
        """Record ``link``; return its block's outputs for the model, the state first."""
        index = len(self.links)
        handed: Sequence[Tensor] = Exit.apply(self, index, False, before, [link.out])
        if link.extra:
            handed += Exit.apply(self, index, True, handed[0], link.extra)
        link.follow(handed[0])
        self.links.append(link)
        return handed

    def collect(self, index: int, extra: bool, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of what link ``index`` has returned: its state, or its extra outputs."""
        with self._lock:
            self._begin_backward(self._asked)
            check_finite(cotangents, self.links[index].path)
            for number, cotangent in enumerate(cotangents):
                if cotangent is not None and extra:
                    self._extra[index, number] = _copied(cotangent)
                elif cotangent is not None:
                    self._direct[index] = plus(self._direct[index], _copied(cotangent))

    def collect_inside(self, index: int, numbers: Sequence[int | None], cotangents: Sequence[Cotangent]) -> None:
        """Keep what came back to what link ``index`` was given.

        Autograd takes what was computed last first, and so comes here before it comes to Start, unless some of what
        led here lies on another device.
        """
        with self._lock:
            path = self.links[index].path if index < len(self.links) else "a block that raised an error"
            self._begin_backward(lambda: INSIDE_ALONE.format(path=path))
            if self._solved:
                raise ChainError(
                    f"the loss uses a tensor from inside {path} on another device: its gradient came too late. "
                    "Keep it on the device of the chain, or return it beside the state."
                )
            for number, cotangent in zip(numbers, cotangents, strict=True):
                if cotangent is not None:
                    self._inside.append((index, number, _copied(cotangent)))

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""
        with self._lock:
            self._begin_backward(self._asked)
            self._solved = True
        self._refuse_changes()
        self.solving = True
        try:
            gradients = self._gradients(keeps_graph())
        finally:
            self.solving = False
        return gradients.initial, *gradients.inputs, *gradients.parameters

    def linearise(self, links: list[Link], keep_graph: bool) -> DepthChain:
        """Return what the engine sees of the pass: ``links``, those that the loss has reached."""
        return DepthChain(links, self.parameters, len(self.inputs), keep_graph, self.chain)

    def _begin_backward(self, unsolved: Callable[[], str]) -> None:
        """Forget what another backward pass has left.

        Args:
            unsolved: returns what to say of a backward pass that does not come to Start.

        Raises:
            ChainError: such a one, or one through graphs that are freed.
        """
        if self._freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its graphs are freed. Call the first backward with "
                "retain_graph=True."
            )
        backward = backward_id()
        if backward != self._backward:
            start = self.start()
            if start is None or not will_run(start):
                raise ChainError(unsolved())
            self._backward, self._direct = backward, [None] * len(self.links)
            self._extra, self._inside, self._solved = {}, [], False

    def _asked(self) -> str:
        return (
            f"torch.autograd.grad was asked for the gradient of a state between {self.links[0].path} and "
            f"{self.links[-1].path}: inside a chain there is its direct cotangent only. Detach the engine, or ask for "
            "gradients of parameters or of what lies before the chain."
        )

    def _gradients(self, keep: bool) -> ChainGradients:
        direct, extra, inside = self._direct, self._extra, self._inside
        self._direct, self._extra, self._inside = [], {}, []
        total = ChainGradients(None, [None] * len(self.inputs), [None] * len(self.parameters))
        if extra:
            total = pull_extra(self.links, self.parameters, extra, direct, total)
        for index, number, cotangent in inside:
            total = add_inside(direct, total, index, number, cotangent)
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is not None:
            links, attachment = self.links[: last + 1], self.chain.attachment
            paths = [link.path for link in links]
            refuse_batched(direct, paths[0])
            chain = self.linearise(links, keep or attachment.compares)
            if not keep:
                self._free()  # The chain that is solved lets go of each graph as soon as it has walked it.
            solved = attachment.solve(chain, direct[: last + 1])
            total = added(solved, total) if extra or inside else solved
            attachment.solved.update(paths)
        if not keep:
            self._free()
            del self.chain
        return total

    def _free(self) -> None:
        for link in self.links:
            link.given = None
        self.links, self._freed = [], True

    def _refuse_changes(self) -> None:
        """Refuse what autograd and the nodes do not see.

        Raises:
            ChainError: hooks that would see a part of a gradient, ``torch.autograd.grad`` that would return one, or
                changes in place that lose one.
        """
        asked = [node.index for node, _ in asked_for() if isinstance(node, EXIT) and node.recording is self]
        if any(i + 1 < len(self.links) or self.links[i].extra for i in asked):
            raise ChainError(self._asked())
        inside = {index for index, number, _ in self._inside if number is None}
        for i, link in enumerate(self.links):
            check_untouched(link)
            # The loss comes to the root where it uses the block's own output, kept by somebody, or a view of it.
            if link.root is not None and link.has_changed and (link.is_shared or will_run(link.root)):
                raise ChainError(
                    f"the output of {link.path} shares memory with another state or output, or is kept inside and used "
                    "by the loss, and was changed in place behind the block: there it would get a wrong gradient. Use "
                    "the out-of-place operation (h = h + x, not h += x)."
                )
            if link.is_hooked and (link.extra or i + 1 in inside or i + 1 < len(self.links)):
                raise ChainError(
                    f"the output of {link.path} has a gradient hook or retain_grad(), which would see a part of its "
                    "gradient: the next block was given the state before, or the block returned other tensors beside "
                    "it. Register it before the next block runs, on a block that returns only its state."
                )
            if link.in_place and i and (self._direct[i - 1] is not None or i in inside):
                raise ChainError(
                    f"{link.path} changes its input in place, the output of {self.links[i - 1].path}, which the model "
                    "uses elsewhere, too: there it has the gradient of one of its two values. Use the out-of-place "
                    "operation (nn.ReLU(inplace=False), x = x + y)."
                )


def _copied(cotangent: Tensor) -> Tensor:
    """Autograd may hand the same tensor on to a function that changes it in place, long before it is used."""
    return cotangent.clone()


def _leading_before(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what leads to the leaves that ``tensors`` were computed from: a chain's anchor in place of its nodes."""
    graph = walk(tensors, ends=(EXIT,))
    chains: list[Any] = [node for node, _ in graph.stops]
    return [*graph.leaves, *(node.recording.anchor for node in chains)]


def recorded_links(state: Tensor) -> Sequence[Link]:
    """Return the links of the pass whose last state is ``state``, so far; none if it is no state of a chain."""
    node: Any = state.grad_fn
    return node.recording.links if isinstance(node, EXIT) else ()
