"""Recording a forward pass through a chain of modules so that ``loss.backward()`` asks the engine for gradients.

The model runs its blocks itself; what records their calls (:mod:`~gradfree.depth.recorder`) cuts autograd's graph at
the block borders, with nodes of their own (:mod:`~gradfree.depth.borders`). No pass is kept on the modules: a state
tensor's own graph node tells which pass it belongs to, so passes may overlap and a model may be called several times
before one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, increment_version

from gradfree.algebra.cotangents import Cotangent
from gradfree.batched.plan import Setting
from gradfree.batched.stacks import Stacks
from gradfree.chains.chain import ChainGradients
from gradfree.chains.solving import Attachment
from gradfree.depth import link as why
from gradfree.depth.batched_chain import BatchedChain, Ran
from gradfree.depth.batching import Batching
from gradfree.depth.borders import (
    ASIDE,
    EXITS,
    INSIDE_ALONE,
    Anchor,
    Aside,
    Entered,
    Entries,
    Exits,
    Handed,
    Outputs,
    Start,
    leading_to,
)
from gradfree.depth.chain import DepthChain, Trained
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link, add_inside, added, pull_aside, refuse_passed, refuse_touched, shares_memory
from gradfree.errors import ChainError
from gradfree.torchside.graph import asked_for, keeps_graph
from gradfree.torchside.guards import check_finite, refuse_batched
from gradfree.torchside.hooks import spare_hooks


class Attached(Protocol):
    """What a recording knows of its chain."""

    attachment: Attachment
    mixing: Mixing
    blocks: dict[str, nn.Module]
    batching: Batching | None
    declared: float | None
    alone: bool

    def trainable(self) -> list[Tensor]:
        """Return the parameters of its blocks that need a gradient."""


def recorded_links(state: Tensor) -> Sequence[Any]:
    """Return the links of the pass whose last state is ``state``, so far; none if it is no state of a chain."""
    node: Any = state.grad_fn
    return node.recording.links if isinstance(node, EXITS) else ()


class Recording:
    """What one forward pass through a chain leaves behind for its backward pass.

    Attributes:
        chain: what is recorded, until the pass is freed: a state may be kept on one of the modules that it leads to.
        of: the same, for as long as it is there.
        parameters: what may be trained in it: its own parameters, and those around it.
        numbers: the places of parameters in that list, by their ids.
        inputs: the tensors that need a gradient and that the first block was given beside its state.
        links: the blocks that have run.
        hooked: the links whose states had gradient hooks when the next block was given them.
        views: the links whose states lie in the memory of those before, and the first of these.
        changed: the links whose outputs the model has changed in place behind the chain.
        uncut: whether the graphs of some links lead to others', or out of the chain.
        solving: whether the engine solves the chain at the moment.
        setting: how its blocks may be batched; ``None``: not at all.
    """

    def __init__(self, chain: Attached, trained: Trained, inputs: Sequence[Tensor]):
        self.chain, self.of = chain, weakref.ref(chain)
        self.parameters, self.numbers = trained
        self.inputs = [(tensor, get_gradient_edge(tensor)) for tensor in inputs]
        self.start: weakref.ref[Any]
        self._origins: list[Tensor] = []
        self.setting: Setting | None = None
        self.links: list[Any] = []
        self.given: list[Tensor | None] = []
        self.handed: list[Handed] = []
        self.hooked, self.views, self.changed = set[int](), dict[int, int](), set[int]()
        self.uncut = self.solving = self.freed = False
        self._exits, self._entries, self._to_hand = Outputs(), Outputs(), list[Handed]()
        self._entered: list[Entered] = []
        self._entrances: list[weakref.ref[Any]] = []
        self._backward = -1
        self._direct: list[Cotangent] = []
        self._aside: dict[tuple[int, int], Tensor] = {}
        self._inside: list[tuple[Entered, Tensor]] = []
        self._solved = False

    def begin(self, path: str, state: Tensor) -> Tensor:
        """Put the Start node behind ``state``, which ``path`` is given; return what the nodes to come are to follow."""
        batching = None if self.inputs else self.chain.batching
        return self.begin_as(state, None if batching is None else batching.begin(state, path))

    def begin_as(self, state: Tensor, setting: Setting | None) -> Tensor:
        """Do the same for a pass of which is known how its blocks may be batched."""
        self.setting, self._origins = setting, [state]
        return Start.apply(self, state, *(tensor for tensor, _ in self.inputs), *self.parameters)

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Note that ``block`` is about to run on ``state``."""

    def add(self, link: Any) -> None:
        """Keep what ``link`` has left."""
        self.links.append(link)
        if self.setting is not None and self.setting.has_lost(link.path):
            self.setting.apart[link.path] = "it has other parameters or buffers than when the pass began"

    def more(self) -> int:
        """Return how many blocks to come a node is to serve: all if they are known to run, else as many again."""
        again = len(self.chain.blocks) if self.setting is not None and self.setting.plan.whole else len(self.links)
        return max(0, min(again, len(self.chain.blocks) - len(self.links) - 1))

    @cached_property
    def _anchor(self) -> Tensor:
        return Anchor.apply(*self._before(), *self.parameters)

    def _leads(self) -> Tensor:
        return self._anchor

    def _before(self) -> list[Tensor]:
        """Return what leads to the leaf tensors before the chain that are not among its parameters."""
        return leading_to([*self._origins, *(tensor for tensor, _ in self.inputs)], self.numbers)

    def enter(self, path: str, state: Tensor) -> Tensor:
        """Return ``state`` without history, for the block at ``path``."""
        entered = Entered(path, len(self.links), None)
        local = self._entries.fill(state)
        if local is None:
            self._entered = []
            local, *rest = self._enter(self._entered, self.more(), [state])
            self._entries = Outputs(rest)
        elif self.handed:
            self.handed[-1].apart.append(local)
        self._entered.append(entered)
        return local

    def enter_inputs(self, path: str, inputs: Sequence[tuple[int, Tensor]]) -> Sequence[Tensor]:
        """Return inputs of the chain without history, for the block at ``path``; each comes with its number."""
        if not inputs:
            return ()
        entered = [Entered(path, len(self.links), number) for number, _ in inputs]
        return self._enter(entered, 0, [tensor for _, tensor in inputs])

    def _enter(self, entered: list[Entered], more: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # A leaf that needs a gradient is kept by the node that would collect it; where the anchor needs one, none must.
        lead = self._leads()
        without_history = (t.detach().requires_grad_(not lead.requires_grad) for t in tensors)
        outputs: Sequence[Tensor] = Entries.apply(self, entered, more, lead, *without_history)
        self._entrances.append(weakref.ref(outputs[0].grad_fn))
        return outputs

    def pass_by(self, link: Ran, given: Tensor, state: Tensor) -> None:
        """Keep ``link``, whose block was ``given`` a state and whose own, ``state``, the model does not get."""
        self.add(link)
        self.given.append(given)
        self.handed.append(Handed.inside(state))

    def go_on(self, link: Ran, given: Tensor, before: Tensor) -> Tensor:
        """Do as :meth:`leave` with a link that nothing else is to be known of; return its state, for the model."""
        state = self._exits.fill(link.out)
        if state is None:
            return self.leave(link, given, before)[0]
        self.links.append(link)
        self.given.append(given)
        self.handed.append(self._to_hand.pop().filled(link.out))
        return state

    def leave(self, link: Link | Ran, given: Tensor | None, before: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Keep ``link``, whose block was ``given`` a state; return its own, and what is beside it, for the model."""
        index, out = len(self.links), link.out
        # Where the model has another view of the state, both must have one count of changes in place.
        state = None if link.aliased else self._exits.fill(out)
        if index and given is not None and isinstance(link, Link) and shares_memory(out, given):
            self.views[index] = self.views.get(index - 1, index - 1)
        more = self.more() if state is None else 0
        self.add(link)
        self.given.append(given)
        if state is None:
            guard, *states = Exits.apply(self, index, before, out.detach(), more)
            # Of all hooks, those on tensors run even where the node itself will not, and this one before the others.
            guard.register_hook(partial(self._check_start, index, index + 1 + more))
            state, self._exits, self._to_hand = states[0], Outputs(states[1:]), [*map(Handed.of, reversed(states))]
            self.handed.append(self._to_hand.pop())
        else:
            self.handed.append(self._to_hand.pop().filled(out))
        return state, [Aside.apply(self, index, n, state, t.detach()) for n, t in enumerate(link.aside)]

    def _check_start(self, first: int, end: int, _: Cotangent) -> None:
        """Refuse a backward pass that will not reach the chain's start; spare hooks on states that it does not reach.

        One node serves the states from ``first`` to ``end``: for autograd it reaches all of them.
        """
        start = self.start()
        assert start is not None  # The graph that is walked leads to it.
        if not torch._C._will_engine_execute_node(start):
            self.begin_backward()
            raise ChainError(why.ASKED.format(first=self.links[0].path, last=self.links[-1].path))
        spare_hooks(handed.hooks() for handed in self.handed[first:end])

    def begin_backward(self) -> None:
        """Forget what another backward pass has left; refuse one through graphs that are freed."""
        if self.freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its graphs are freed. Call the first backward with "
                "retain_graph=True."
            )
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._direct, self._aside, self._inside = backward, [None] * len(self.links), {}, []
            self._solved = False

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the states from that of link ``index`` on."""
        self.begin_backward()
        for i, cotangent in enumerate(cotangents, index):
            if cotangent is not None:
                check_finite([cotangent], self.links[i].path)
                # Autograd may hand the same tensor on to a function that changes it in place, long before it is used.
                self._direct[i] = cotangent.clone()

    def collect_aside(self, index: int, number: int, cotangent: Cotangent) -> None:
        """Keep the cotangent of what link ``index`` returned beside its state."""
        self.begin_backward()
        if cotangent is not None:
            self._aside[index, number] = cotangent.clone()

    def collect_inside(self, entered: Entered, cotangent: Tensor) -> None:
        """Keep what came back to an input of a block.

        Autograd takes what was computed last first, and so comes here before it comes to Start, unless some of what
        led here lies on another device.
        """
        self.begin_backward()
        start = self.start()
        if start is None or not torch._C._will_engine_execute_node(start):
            raise ChainError(INSIDE_ALONE.format(path=entered.path))
        if self._solved:
            raise ChainError(
                f"the loss uses a tensor from inside {entered.path} on another device: its gradient came too late. "
                "Keep it on the device of the chain, or return it beside the state."
            )
        self._inside.append((entered, cotangent.clone()))

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""
        self.begin_backward()
        self._exits, self._entries, self._to_hand = Outputs(), Outputs(), []
        self._refuse()
        self._follow_changes()
        self.solving = True
        try:
            gradients = self._gradients(keeps_graph())
        finally:
            self.solving = False
        self._solved = True
        refuse_passed(self._entrances, self._leads(), self.parameters)
        return gradients.initial, *gradients.inputs, *gradients.parameters

    @property
    def columns(self) -> Stacks | None:
        """What the parameters are, where all blocks have run at once."""
        return None if self.setting is None else self.setting.columns

    def leaves(self) -> Iterable[Sequence[Tensor]]:
        """Return what each parameter leads to: itself, or those that are stacked in it."""
        return ([p] for p in self.parameters) if self.columns is None else self.columns.rows

    def _gradients(self, keep: bool) -> ChainGradients:
        direct, aside, inside = self._direct, self._aside, self._inside
        self._direct, self._aside, self._inside = [], {}, []
        total = ChainGradients(None, [None] * len(self.inputs), [None] * len(self.parameters))
        if aside:
            total = pull_aside(self.links, self.parameters, aside, direct, total)
        for (_, index, number), cotangent in inside:
            total = add_inside(direct, total, index, number, cotangent)
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is not None:
            links = self.links[: last + 1]
            attachment = self.chain.attachment
            chain = self.linearise(links, keep or self.uncut or attachment.compares)
            paths = [link.path for link in links]
            if isinstance(chain, BatchedChain):
                refuse_batched(direct, paths[0])
            if not keep:
                self._free()
            solved = attachment.solve(chain, direct[: last + 1])
            total = added(solved, total) if aside or inside else solved
            attachment.solved.update(paths)
        if not keep:
            self._free()
            del self.chain
        return total

    def _free(self) -> None:
        """Leave the graphs to the chain that is solved, which may let go of each as soon as it has walked it."""
        self.links, self.given, self.handed, self._origins, self.freed = [], [], [], [], True

    def _refuse(self) -> None:
        asked = [(n, i) for n, i in asked_for() if isinstance(n, EXITS | ASIDE) and n.recording is self]
        if any(self.uncut if isinstance(n, ASIDE) else n.index + i < len(self.links) for n, i in asked):
            raise ChainError(why.ASKED.format(first=self.links[0].path, last=self.links[-1].path))
        for link, handed in zip(self.links, self.handed, strict=True):
            state = handed.state()
            if not handed.hooks() and (state is None or not state.retains_grad):
                continue
            if link.aliased:
                raise ChainError(why.ALIASED.format(path=link.path))
            if link is not self.links[-1]:
                raise ChainError(
                    f"the output of {link.path} has got a gradient hook or retain_grad() after the next block has used "
                    "it: it would see the state's direct cotangent only, not its whole gradient. Register it before, "
                    "or remove it."
                )
        for entered, _ in self._inside:
            if entered.link and entered.number is None and self._is_hooked(entered.link - 1):
                raise ChainError(
                    f"the output of {self.links[entered.link - 1].path} has a gradient hook or retain_grad(), but the "
                    f"loss uses a tensor from inside {entered.path}, which was given it: the hook would not see that "
                    "gradient. Remove it, or return the tensor as a copy of its own."
                )
        inside = why.used_inside(self.links, (entered.link for entered, _ in self._inside))
        for link, given in zip(self.links, self.given, strict=True):
            refuse_touched(link, given)
        for index, link in enumerate(self.links[1:]):
            if link.in_place and (self._direct[index] is not None or index in inside):
                raise ChainError(
                    f"{link.path} changes its input in place, the output of {self.links[index].path}, which the model "
                    "uses elsewhere, too: there it has the gradient of one of its two values. Use the out-of-place "
                    "operation (nn.ReLU(inplace=False), x = x + y)."
                )

    def _is_hooked(self, index: int) -> bool:
        state = self.handed[index].state()
        return index in self.hooked or bool(self.handed[index].hooks()) or (state is not None and state.retains_grad)

    def follow_block(self, versions: Sequence[tuple[Tensor, int]]) -> None:
        """Let graphs that have the last state know that the block behind it has changed it in place.

        Args:
            versions: the tensors that have its values, and their counts of changes before.
        """
        # Some of them share a count with what the block was given.
        increment_version([tensor for tensor, version in versions if tensor._version == version])
        last = len(self.handed) - 1
        for i in range(self.views.get(last, last), last + 1):
            self.handed[i] = self.handed[i]._replace(version=self.handed[i].seen._version)

    def _follow_changes(self) -> None:
        """Let the blocks' graphs know of states that the model has changed in place: autograd refuses what it needs."""
        for i, handed in enumerate(self.handed):
            seen, version = handed.seen, handed.version
            if seen._version != version:
                if i + 1 < len(self.links) and isinstance(self.links[i + 1], Ran):
                    raise ChainError(
                        f"the state that {self.links[i + 1].path} was given has been modified by an inplace operation "
                        "since, but the backward pass needs it. Use the out-of-place operation (h = h + x, not h += x)."
                    )
                self._refuse_change_of_views(i)
                older = self.handed[self.views.get(i, i) : i]
                increment_version([*handed.apart, *(t for h in older for t in (*h.apart, h.seen))])
                self.handed[i] = handed._replace(version=seen._version)
                self.changed.add(i)

    def _refuse_change_of_views(self, last: int) -> None:
        """Refuse that state ``last`` was changed where the model uses what may share its memory elsewhere."""
        changed, first = self.handed[last].seen, self.given[0]
        inside = why.used_inside(self.links, (entered.link for entered, _ in self._inside))
        older = enumerate(zip(self.handed[:last], self.links, self._direct, strict=False))
        used = [h.seen for i, (h, link, e) in older if e is not None or link.aliased or i in inside]
        used += [] if first is None else [first]
        if last in inside or last + 1 in self.views or any(shares_memory(changed, old) for old in used):
            raise ChainError(
                f"the output of {self.links[last].path} shares memory with another state, or perhaps with a tensor "
                "from inside a block that the loss uses, and was changed in place behind the chain: these would get a "
                "wrong gradient. Use the out-of-place operation (h = h + x, not h += x)."
            )

    def linearise(self, links: list[Any], keep_graph: bool) -> DepthChain:
        """Return what the engine sees of the pass: ``links``, those that the loss has reached."""
        memory, mixing = self.chain.attachment.memory, self.chain.mixing
        inputs, declared, alone = len(self.inputs), self.chain.declared, self.chain.alone
        chain = DepthChain(links, self.parameters, inputs, keep_graph, memory, mixing, declared, alone)
        if self.setting is None or self.chain.batching is None:
            return chain
        return self.chain.batching.chain(self.setting, self, chain)
