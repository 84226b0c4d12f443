"""One forward pass through a chain in depth: what it records, and how ``loss.backward()`` solves it.

Forward, for each block (:class:`~gradfree.depth.recorder.BlockRecorder`, the nodes of :mod:`~gradfree.depth.nodes`):

1. *Before the block runs*, the graph node of its state identifies the pass. A state without such a node begins a new
   pass, with a Start node in the graph. An Entry node gives the block the state without history.
2. *The block runs* as usual. Its graph ends at its Entry.
3. *After the block has run*, its graph becomes a :class:`~gradfree.depth.link.Link` of the pass, and the model gets the
   output of an Exit node.

Backward, in one call of ``loss.backward()``:

4. Autograd runs every Exit, and those Entries that the loss leads to. They collect the direct cotangents e_i.
5. Autograd runs Start last. The pass walks each block's graph once, to find the parameters that it leads to and to
   refuse tensors from outside of the chain. It refuses changes and hooks that neither autograd nor the nodes notice,
   and makes a :class:`~gradfree.depth.depth_chain.DepthChain` of its links. The engine solves it: VJPs and parameter
   gradients are calls of ``torch.autograd.grad`` on the blocks' graphs.
6. Start returns all gradients to autograd, which adds them to ``.grad`` as usual.

With ``retain_graph=True`` another backward pass may solve the chain again. Otherwise the links are freed, and a later
backward pass raises. A pass stores nothing on the modules: passes may overlap and run in several threads, and a model
may be called several times before one backward pass.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from gradfree.algebra.cotangents import Cotangent, plus
from gradfree.chains.chain import ChainGradients
from gradfree.depth.depth_chain import Attached, DepthChain
from gradfree.depth.link import Link, add_extra_vjps, add_inside, added, check_link
from gradfree.depth.nodes import EXIT, ONLY_INSIDE, Anchor, Entry, Exit, Start
from gradfree.errors import ChainError
from gradfree.torchside.graph import walk
from gradfree.torchside.guards import check_finite, refuse_batched
from gradfree.torchside.private import asked_for, backward_id, hooks_of, keeps_graph, will_run

_MANY = 16
"""An Entry leads to at most so many tensors."""


class DepthPass:
    """One forward pass through a chain, and its backward passes.

    Args:
        chain: the chain that the pass runs through.
        trained: the trainable parameters of each block, by the block's path.
        inputs: the first block's inputs that need a gradient, without the state.
        outside: other trainable parameters of the model, which a block may use.

    Attributes:
        chain_ref: a weak reference to the chain.
        anchors: what the next entry leads to: the leaves before the chain, the parameters outside of the blocks and
            those of the blocks so far, or Anchors of many of these; and a leaf, so that it needs a gradient.
        parameters: the trainable parameters, each once.
        known: the index of each parameter, by its id.
        links: the blocks that have run.
        solving: whether the engine is solving the chain now.
    """

    def __init__(
        self,
        chain: Attached,
        trained: Mapping[str, Sequence[Tensor]],
        inputs: Sequence[Tensor],
        outside: Sequence[Tensor] = (),
    ):
        # _gradients() deletes `chain`: a state stored on a module would otherwise form a reference cycle with it.
        self.chain, self.chain_ref = chain, weakref.ref(chain)
        self._trained = trained
        # By id: the hash of a tensor is computed in Python, which is slow.
        once = {id(p): p for p in (*itertools.chain(*trained.values()), *outside)}
        self.parameters: Sequence[Tensor] = [*once.values()]
        self.known = dict(zip(once, range(len(once)), strict=True))
        self._kinds = [(p.dtype, p.device) for p in self.parameters]
        self._leaf = torch.empty(0, requires_grad=True)
        self.anchors: list[Tensor] = [self._leaf, *outside]
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
        """Put the Start node after ``state``, h_0; return Start's output, which the first Exit node follows."""
        self.initial = state.detach()
        tensors = [tensor for tensor, _ in self.inputs]
        self.anchors += _leaves_before([state, *tensors])
        return Start.apply(self, state, *tensors, *self.parameters)

    def before_block(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Called before ``block`` runs on ``state``; does nothing here, subclasses check or store things."""

    def number(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor among the inputs of the pass; ``None`` if it is none of them."""
        edge = get_gradient_edge(tensor)
        for n, (known, before) in enumerate(self.inputs):
            # A change in place gives the same tensor another edge. Equal edges may be different objects.
            if tensor is known and (edge.node, edge.output_nr) == (before.node, before.output_nr):
                return n
        return None

    def enter(self, path: str, numbers: Sequence[int | None], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return ``tensors`` without history, for the block at ``path``; for ``numbers`` see :class:`Entry`."""
        anchors = [self._leaf]
        if self.may_keep_inside(path):
            if len(self.anchors) > _MANY:
                self.anchors = [Anchor.apply(*self.anchors)]
            anchors = self.anchors
        entered: Sequence[Tensor] = Entry.apply(self._ref, len(self.links), path, numbers, tensors, *anchors)
        return entered

    def may_keep_inside(self, path: str) -> bool:
        """Return whether the loss may use a tensor from inside the block at ``path``: by default yes.

        If not, the block's entry leads to no anchor, because each VJP would visit all of them.
        """
        return True

    def leave(self, link: Link, before: Tensor) -> Sequence[Tensor]:
        """Record ``link``; return its block's outputs behind Exit nodes, the state first.

        Raises:
            ChainError: the block's output needs a gradient, but nothing that the pass knows: Start would never run.
        """
        if not before.requires_grad:
            check_link(link)
        index = len(self.links)
        outputs: Sequence[Tensor] = Exit.apply(self, index, False, before, [link.out])
        if link.extra:
            outputs += Exit.apply(self, index, True, outputs[0], link.extra)
        link.after = weakref.ref(outputs[0])
        self.anchors += self._trained[link.path]
        self.links.append(link)
        return outputs

    def observe(self, index: int, state: Tensor) -> None:
        """Called when the state after link ``index`` gets its first gradient hook."""
        hooks = hooks_of(state)
        if not self._freed and hooks is not None:
            self.links[index].hooks = weakref.ref(hooks)

    def collect(self, index: int, extra: bool, cotangents: Sequence[Cotangent]) -> None:
        """Store the direct cotangents of what link ``index`` has returned: its state, or its extra outputs."""
        with self._lock:
            self._begin_backward(self._not_whole)
            check_finite(cotangents, self.links[index].path)
            for number, cotangent in enumerate(cotangents):
                if cotangent is not None and extra:
                    self._extra[index, number] = _copied(cotangent)
                elif cotangent is not None:
                    self._direct[index] = plus(self._direct[index], _copied(cotangent))

    def collect_inside(self, index: int, numbers: Sequence[int | None], cotangents: Sequence[Cotangent]) -> None:
        """Store the cotangents of the inputs of link ``index``, from tensors inside its block that the loss uses.

        On one device autograd runs the node that was created last first, so this runs before Start.

        Raises:
            ChainError: Start has run already, as may happen if such a tensor is on another device.
        """
        with self._lock:
            path = self.links[index].path if index < len(self.links) else "a block that raised an error"
            self._begin_backward(lambda: ONLY_INSIDE.format(path=path))
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
            self._begin_backward(self._not_whole)
            self._solved = True
        self._refuse_unseen()
        self._refuse_converted()
        self.solving = True
        try:
            gradients = self._gradients(keeps_graph())
        finally:
            self.solving = False
        return gradients.initial, *gradients.inputs, *gradients.parameters

    def linearise(self, links: list[Link], keep_graph: bool) -> DepthChain:
        """Return the chain that the engine solves: ``links``, those that the loss has reached."""
        chain = DepthChain(links, self.parameters, len(self.inputs), keep_graph, self.chain)
        chain.initial = self.initial
        return chain

    def _begin_backward(self, unsolved: Callable[[], str]) -> None:
        """Drop the cotangents of an earlier backward pass, if this is a new one.

        Args:
            unsolved: returns the error message for a backward pass that will not run Start.

        Raises:
            ChainError: the backward pass will not run Start, or the graphs are freed.
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

    def _not_whole(self) -> str:
        return (
            f"torch.autograd.grad cannot return the gradient of a state between {self.links[0].path} and "
            f"{self.links[-1].path}: inside a chain it finds only a part of that gradient. Detach the engine, or "
            "request gradients of parameters or of tensors before the chain."
        )

    def _gradients(self, keep: bool) -> ChainGradients:
        direct, extra, inside = self._direct, self._extra, self._inside
        self._direct, self._extra, self._inside = [], {}, []
        total = ChainGradients(None, [None] * len(self.inputs), [None] * len(self.parameters))
        if extra:
            total = add_extra_vjps(self.links, self.parameters, extra, direct, total)
        for index, number, cotangent in inside:
            total = add_inside(direct, total, index, number, cotangent)
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is not None:
            links, attachment = self.links[: last + 1], self.chain.attachment
            paths = [link.path for link in links]
            refuse_batched(direct, paths[0])
            chain = self.linearise(links, keep or attachment.compares)
            if not keep:
                self._free()  # Only `chain` holds the graphs now, so it can free each one after its walk.
            solved = attachment.solve(chain, direct[: last + 1])
            total = added(solved, total) if extra or inside else solved
            attachment.solved.update(paths)
            self.chain.joined.update(paths if len(paths) > 1 else ())
        if not keep:
            self._free()
            del self.chain
        return total

    def _free(self) -> None:
        for link in self.links:
            link.given = None
        self.links, self.anchors, self._freed = [], [], True

    def _refuse_unseen(self) -> None:
        """Check for what neither autograd nor the nodes notice.

        Raises:
            ChainError: a hook would see, or ``torch.autograd.grad`` would return, a part of a gradient; or a change in
                place would lose a part of one.
        """
        asked = {node for node, _ in asked_for()}
        own = [node.index for node in asked if isinstance(node, EXIT) and node.recording is self]
        if any(i + 1 < len(self.links) or self.links[i].extra for i in own):
            raise ChainError(self._not_whole())
        inside = {index for index, number, _ in self._inside if number is None}
        functions = set[Node]()
        for i, link in enumerate(self.links):
            self._refuse_in_link(i, asked, inside, functions)
            functions.update(link.graph.functions)

    def _refuse_in_link(self, i: int, asked: Set[Node], inside: Set[int], functions: Set[Node]) -> None:
        """Check block i; ``functions`` are the custom functions of the graphs of those before it.

        Raises:
            ChainError: as :meth:`_refuse_unseen`.
        """
        link = self.links[i]
        check_link(link)
        if asked and link.leads_to(asked):
            raise ChainError(
                f"torch.autograd.grad cannot return the gradient of a tensor that {link.path} has computed, or "
                "takes from outside without an argument: inside a chain it finds only a part of that gradient. "
                "Give it to the block as an argument; for what the block computes, detach the engine."
            )
        if not functions.isdisjoint(link.graph.functions):
            raise ChainError(
                f"{link.path} and a block before it take, without an argument, a tensor that a custom autograd "
                "function has computed: it would run backward once for each of them, on a part of the gradient. "
                "Pass the tensor as an argument, or let each block compute it."
            )
        # The loss reaches the root if it uses the block's undetached output, or a view of it.
        if link.root is not None and link.has_changed and (link.is_shared or will_run(link.root)):
            raise ChainError(
                f"the output of {link.path} shares memory with another state or output, or is stored by the block "
                "and used by the loss, and was changed in place after the block: it would get a wrong gradient. "
                "Use the out-of-place operation (h = h + x, not h += x)."
            )
        used_twice = link.extra or i + 1 in inside or i + 1 < len(self.links)
        if link.is_hooked and (used_twice or (link.root is not None and will_run(link.root))):
            raise ChainError(
                f"the output of {link.path} has a gradient hook or retain_grad(), which would see only a part of "
                "its gradient: the hook was registered after the next block had run, or the block returned other "
                "tensors beside its state, or stored its state for the loss. Register it before the next block "
                "runs, on a block that returns only its state."
            )
        if link.in_place and i and (self._direct[i - 1] is not None or i in inside):
            raise ChainError(
                f"{link.path} changes its input in place, the output of {self.links[i - 1].path}, which the model "
                "uses elsewhere, too: the two values would share one gradient. Use the out-of-place operation "
                "(nn.ReLU(inplace=False), x = x + y)."
            )

    def _refuse_converted(self) -> None:
        """Raise if a parameter has another dtype or device than when the pass began."""
        converted = {n for n, p in enumerate(self.parameters) if (p.dtype, p.device) != self._kinds[n]}
        for link in reversed(self.links if converted else ()):
            if not converted.isdisjoint(link.parameters):
                raise ChainError(
                    f"a parameter of {link.path} got another dtype or device between the forward and the backward "
                    "pass, or in the block's own forward (model.float(), layer.to(...)): its gradient would be lost, "
                    "or rounded. Convert the model before the forward pass, or after the backward pass; run a block "
                    "that converts itself once before, under torch.no_grad()."
                )


def _copied(cotangent: Tensor) -> Tensor:
    """Return a copy: autograd may pass the same tensor to a function that changes it in place before we use it."""
    return cotangent.clone()


def _leaves_before(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that ``tensors`` were computed from; for leaves behind another chain, that chain's anchors."""
    graph = walk(tensors, ends=(EXIT,))
    exits: list[Any] = [node for node, _ in graph.stops]
    passes = dict.fromkeys(node.recording for node in exits)
    return [*graph.leaves, *(anchor for one in passes for anchor in one.anchors)]


def recorded_links(state: Tensor) -> Sequence[Link]:
    """Return the links recorded so far in the pass that ``state`` belongs to; none if it is no state of a chain."""
    node: Any = state.grad_fn
    return node.recording.links if isinstance(node, EXIT) else ()
