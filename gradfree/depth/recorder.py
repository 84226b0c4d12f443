"""Recording the calls of blocks: autograd's graph is cut around each and added to a recording.

What cannot go on a recorded pass starts another one, at the block where that shows: a block that is not given the
state before it, or tensors that depend on a state. What turns out, once it has run, to be no link at all is left to
autograd. The outer graph links all these, exactly; engines see shorter chains, and the site keeps why.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from gradfree.chains.refusals import hooked
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.depth import link as why
from gradfree.depth.batched_chain import Ran
from gradfree.depth.batching import Batching
from gradfree.depth.borders import ASIDE, BORDERS, EXITS, Past, edge
from gradfree.depth.chain import Trained
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link, has_hooks, shares_memory
from gradfree.depth.ports import Port, port_of, replaced, tensors_in
from gradfree.depth.recording import Recording
from gradfree.depth.without_graph import CallsByThread, RecordedBlock
from gradfree.errors import ChainError, refuse
from gradfree.torchside.graph import Reached, may_write, older, walk
from gradfree.torchside.guards import refuse_transforms
from gradfree.torchside.private import checkpointed, recomputed, uncompiled
from gradfree.torchside.sharding import is_spread, sharded
from gradfree.torchside.unsaved import Unsaved


class _Call(NamedTuple):
    """What is known of a call when it begins."""

    recording: Recording
    before: Tensor
    begun: bool
    state: Tensor
    given: Tensor | None
    entries: tuple[tuple[int | None, GradientEdge], ...]
    versions: tuple[tuple[Tensor, int], ...]
    outer: tuple[tuple[Tensor, int], ...]
    number: int

    @property
    def without_graph(self) -> bool:
        """Whether the block is to run without a graph."""
        return False


class _BareCall(NamedTuple):
    """The same of one that begins a pass without a graph."""

    recording: Recording
    before: Tensor
    given: Tensor
    version: int

    @property
    def without_graph(self) -> bool:
        """Whether the block is to run without a graph."""
        return True


class RecordedChain:
    """One chain of a model with an engine attached.

    Args:
        attachment: solves for the gradients.
        site: the chain.

    Attributes:
        skips: whether a block that returns the very state that it was given is no link of the chain.
        by_hooks: whether blocks are recorded by hooks alone; else in place of their ``forward``, where they have no
            other one of their own.
    """

    skips = True
    by_hooks = False

    def __init__(self, attachment: Attachment, site: Site):
        self.attachment = attachment
        self.blocks, self.inside, self.splits = site.blocks, site.inside, site.splits
        self.declared, self.alone = site.declared, site.alone
        self.mixing = Mixing()
        engine, batched = attachment.engine, attachment.batched
        self.batching: Batching | None = None
        if batched and engine.pulls_at_once and site.can_be_batched:
            self.batching = Batching(self.blocks, batched, engine.needs_residual and site.declared is None)
        modules = dict.fromkeys(m for block in self.blocks.values() for m in block.modules())
        # What every pass looks at, in one place: to go through all modules for it costs more than small blocks do.
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._hooks = [h for m in self.inside.values() for h in (m._backward_hooks, m._backward_pre_hooks)]
        self._trained: tuple[list[Tensor], list[bool], Trained] = ([], [], Trained([], {}))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was trained: a copy has parameters of its own."""
        return {**self.__dict__, "_trained": ([], [], Trained([], {}))}

    def record(self) -> list[Removable]:
        """Record the calls of the blocks; return what to take off again."""
        handles: list[Removable] = []
        for block, path in {block: path for path, block in reversed(self.blocks.items())}.items():
            recorder = BlockRecorder(self, path, port_of(block))
            if not self.by_hooks and "forward" not in vars(block):
                handles += [RecordedBlock(recorder, block, path), Unsaved(block, {*RecordedBlock.KEYS})]
                continue
            # Behind every pre-hook and before every forward hook that the user has: these belong to the model.
            handles.append(block.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(block.register_forward_hook(recorder.leave, prepend=True))
        return handles

    def begin(self, state: Tensor, inputs: Sequence[Tensor]) -> Recording:
        """Return the recording of a pass that starts from ``state``."""
        around = [p for p in self.attachment.around() if not is_spread(p)]
        found = [p for own in self._parameters for p in own.values() if p is not None] + around
        needed = [p.requires_grad for p in found]
        before, needed_before, trained = self._trained
        if needed != needed_before or not all(map(is_, found, before)):
            trained = Trained.of(p for p, need in zip(found, needed, strict=True) if need)
            self._trained = found, needed, trained
        return Recording(self, trained, inputs)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of all blocks that need a gradient, each once."""
        found = (p for own in self._parameters for p in own.values() if p is not None and p.requires_grad)
        return list({id(p): p for p in found}.values())

    def check(self) -> None:
        """Refuse what may have come since the engine was attached: sharded modules, backward hooks, transforms."""
        refuse_transforms(next(iter(self.blocks)))
        refuse(sharded(self.inside))
        if any(self._hooks):
            refuse(hooked(self.inside))

    def split(self, path: str, reason: str, remedy: str) -> None:
        """Note that the block at ``path`` does not go on the chain of the block before it.

        Args:
            path: of the block.
            reason: why.
            remedy: what to do about it, for engines that take none but whole chains.
        """
        self.splits[path] = reason


class BlockRecorder(CallsByThread):
    """The hooks of one block."""

    def __init__(self, chain: RecordedChain, path: str, port: Port):
        super().__init__()
        self.chain, self.path, self.port = chain, path, port

    # Compiled into one region with what lies around them, blocks would share a graph; and this imports no compiler.
    @uncompiled
    def enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the block inputs without history and join the pass that its state belongs to, or start one."""
        self.call = None
        # A checkpoint around the block runs it again for what autograd has kept of the pass; that is recorded already.
        if not torch.is_grad_enabled() or recomputed():
            return None
        if "_is_replica" in vars(block):
            raise ChainError(why.REPLICA.format(path=self.path))
        state, others, put = self.port.take(args, kwargs)
        needed = state is not None and state.requires_grad
        if not needed and not others and not any(p.requires_grad for p in block.parameters()):
            return None
        if state is None:
            self.chain.split(self.path, *why.NO_STATE)
            return None
        recording, before, begun = self._join(state, others)
        recording.before(self.path, block, state)
        if recording.setting is not None and not others:
            alone = len(args) == 1 and not kwargs and not block._forward_pre_hooks and not block._forward_hooks
            if not alone:
                recording.setting.apart[self.path] = "it is given more than its state, or has hooks of its own"
            elif begun and recording.setting.is_batched(self.path):
                self.call = _BareCall(recording, before, state, state._version)
                return None
        given = recording.enter(self.path, state) if needed else None
        numbers = [None if t is state else _number(recording, t) for t in others]
        known = [(n, t) for n, t in zip(numbers, others, strict=True) if n is not None]
        local = recording.enter_inputs(self.path, known)
        entries = [(n, edge(t)) for (n, _), t in zip(known, local, strict=True)]
        live = [*local] if given is None else [given, *local]
        self.call = _Call(
            recording,
            before,
            begun,
            state,
            given,
            tuple(entries) if given is None else ((None, edge(given)), *entries),
            tuple((t, t._version) for t in live),
            () if begun else tuple((t, t._version) for t in (state, recording.links[-1].out)),
            torch._C._autograd._get_sequence_nr(),
        )
        first, rest = state if given is None else given, iter(local)
        inputs = [
            first if t is state else _uncut(recording, t) if n is None else next(rest)
            for n, t in zip(numbers, others, strict=True)
        ]
        return put(first, inputs)

    @uncompiled
    def leave(self, block: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Add the block's graph to the recording; return its output with the next state in it."""
        call, self.call = self.call, None
        if call is None:
            return None
        state, rest = self.port.split(out)
        if state is None:
            raise ChainError(
                f"{self.path} returned {type(out).__name__}, in which the next state is not found: a block of a chain "
                "must return a tensor, or a tuple, list, dictionary or dataclass whose first entry is one. Say where "
                f"it is with gradfree.register_port({type(block).__name__}, ...), or leave the block out of the chain."
            )
        if isinstance(call, _BareCall):
            return self._leave_without_graph(block, state, rest, call)
        in_place = self._changed(call)
        if in_place:
            call.recording.follow_block(call.outer)
        if not state.requires_grad:
            return None
        if self.chain.skips and state is call.given and not in_place:
            # The model goes on with the very tensor that it had; what else the block returns leads to its Entry.
            if call.recording.setting is not None:
                call.recording.setting.apart[self.path] = "it hands its state on as it is"
            joined = self.port.join(call.state, rest)
            return joined if rest is None else replaced(joined, {id(state): call.state})
        aside = [] if rest is None else [t for t in tensors_in(out) if t.requires_grad and not shares_memory(t, state)]
        others = [] if rest is None else [t for t in tensors_in(out) if t is not state and t.requires_grad]
        aliased = len(others) > len(aside)
        graph = walk([state, *aside], {entry.node for _, entry in call.entries})
        if strange := self._strange(graph, call):
            if in_place:
                raise ChainError(why.IN_PLACE.format(path=self.path))
            self.chain.split(
                self.path, f"it uses {strange}: autograd goes through it", why.OUTSIDER.format(what=strange)
            )
            if aliased:
                raise ChainError(why.ALIASED_OUTSIDER.format(path=self.path, what=strange))
            entries = [node for node, _ in graph.stops]
            past = Past.apply(self.path, entries, call.before, state)
            joined = self.port.join(past, rest)
            return joined if rest is None else replaced(joined, {id(state): past})
        recording = call.recording
        if recording.setting is not None and (rest is not None or in_place or (call.entries and not graph.stops)):
            recording.setting.apart[self.path] = "it returns more than its state, changes it in place or cuts the chain"
        recording.uncut = recording.uncut or older(graph.nodes, call.number)
        link = self._link(block, state, aside, graph, call, (in_place, aliased))
        after, handed = recording.leave(link, call.given, call.before)
        out = self.port.join(after, rest)
        if rest is None:
            return out
        # The state itself may stand in there once more.
        return replaced(out, {id(state): after, **{id(t): new for t, new in zip(aside, handed, strict=True)}})

    def _leave_without_graph(self, block: nn.Module, state: Tensor, rest: Any, call: _BareCall) -> Tensor:
        recording, before, given, version = call
        if given._version != version or rest is not None:
            raise ChainError(why.CHANGED.format(path=self.path))
        x = given.detach()
        return recording.leave(Ran(self.path, block, state.detach(), x), x, before)[0]

    def _link(
        self,
        block: nn.Module,
        state: Tensor,
        aside: Sequence[Tensor],
        graph: Reached,
        call: _Call,
        changed: tuple[bool, bool],
    ) -> Link:
        # An edge keeps its node alive only from torch 2.9 on; before, it dangles where no output leads to it.
        entries = [(number, e) for number, e in call.entries if (e.node, e.output_nr) in graph.stops]
        of_state = walk([state], {e.node for _, e in entries}).stops if aside else graph.stops
        reached = [(number, e) for number, e in entries if (e.node, e.output_nr) in of_state]
        numbers = call.recording.numbers
        return Link(
            self.path,
            block,
            state,
            next((e for number, e in reached if number is None), None),
            tuple((number, e) for number, e in reached if number is not None),
            {numbers[id(leaf)]: leaf for leaf in graph.leaves},
            state.grad_fn,
            may_write(graph.kinds),
            tuple(aside),
            tuple(entries),
            *changed,
            checkpointed(),
        )

    def _join(self, state: Tensor, others: Sequence[Tensor]) -> tuple[Recording, Tensor, bool]:
        """Return the recording that ``state`` belongs to, the node's output to continue from, and whether it is new."""
        node: Any = state.grad_fn
        recording = node.recording if isinstance(node, EXITS) else None
        if recording is not None and recording.of() is self.chain:
            problem = self._cannot_go_on(recording, node.index + state.output_nr - 1, state, others)
            if problem is None:
                return recording, state, False
            self.chain.split(self.path, *problem)
        else:
            self.chain.check()
            if isinstance(node, ASIDE) and node.recording.of() is self.chain:
                self.chain.split(self.path, *why.NOT_THE_STATE)
            elif state.requires_grad and self.path != next(iter(self.chain.blocks)):
                self.chain.split(self.path, *why.BETWEEN)
        recording = self.chain.begin(state, [t for t in others if t is not state])
        return recording, recording.begin(self.path, state), True

    def _cannot_go_on(
        self, recording: Recording, index: int, state: Tensor, others: Sequence[Tensor]
    ) -> tuple[str, str] | None:
        """Return why the block cannot be the next link of ``recording``, and what to do; ``None`` if it can."""
        last = recording.links[index].path if index < len(recording.links) else ""
        if recording.columns is not None:
            return why.WHOLE
        if index != len(recording.links) - 1:
            return f"the output of {last} has been used by another block: the blocks branch", why.BRANCHING
        if has_hooks(state):
            if recording.links[index].aliased:
                raise ChainError(why.ALIASED.format(path=last))
            recording.hooked.add(index)
            return (
                f"the output of {last} has a gradient hook or retain_grad(), which sees its whole gradient",
                why.HOOKED,
            )
        for tensor in others:
            if tensor is not state and _number(recording, tensor) is None:
                graph = walk([_uncut(recording, tensor)])
                own = not graph.kinds.isdisjoint(BORDERS)
                if own or any(id(leaf) not in recording.numbers for leaf in graph.leaves):
                    what = "depends on a state" if own else "needs a gradient"
                    shape = tuple(tensor.shape)
                    return (
                        f"it was given a tensor of shape {shape} that {what} and that no block before it was",
                        why.INPUT,
                    )
        return None

    def _changed(self, call: _Call) -> bool:
        """Tell whether the block has changed its state in place; refuse what is wrong then."""
        changed = [tensor for tensor, version in call.versions if tensor._version != version]
        if not changed:
            return False
        # What the outer graph has computed with the tensor that the pass began with, nobody sees.
        if call.begun or len(changed) > 1 or changed[0] is not call.given:
            raise ChainError(why.IN_PLACE.format(path=self.path))
        return True

    def _strange(self, graph: Reached, call: _Call) -> str | None:
        """Return what the block's graph leads to that is no part of the recording."""
        for leaf in graph.leaves:
            if id(leaf) not in call.recording.numbers:
                return f"a tensor of shape {tuple(leaf.shape)} that needs a gradient"
        own = {(e.node, e.output_nr) for _, e in call.entries}
        if not graph.stops <= own or not graph.kinds.isdisjoint(BORDERS):
            return "another state"
        if _REENTRANT in graph.kinds:
            return "a checkpoint with use_reentrant=True, which backward() alone can run"
        return None


_REENTRANT: type = CheckpointFunction._backward_cls


def _number(recording: Recording, tensor: Tensor) -> int | None:
    """Return the number of a tensor among the inputs of the pass."""
    edge = get_gradient_edge(tensor)
    for n, (known, before) in enumerate(recording.inputs):
        # A change in place gives the same tensor another history. The edges themselves may differ from call to call.
        if tensor is known and (edge.node, edge.output_nr) == (before.node, before.output_nr):
            return n
    return None


def _uncut(recording: Recording, tensor: Tensor) -> Tensor:
    """Return a tensor as its block has computed it, where an earlier one of the pass returned it beside its state."""
    node: Any = tensor.grad_fn
    if isinstance(node, ASIDE) and node.recording is recording:
        original: Tensor = recording.links[node.index].aside[node.number]
        return original
    return tensor
