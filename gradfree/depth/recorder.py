"""The hooks on the blocks of a chain, which cut autograd's graph around each and add it to a recording.

What cannot go on a recorded pass starts another one, at the block where that shows: a block that is not given the
state before it, or tensors that depend on a state. What turns out, once it has run, to be no link at all is left to
autograd. The outer graph links all these, exactly; engines see shorter chains, and the site keeps why.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradfree.chains.refusals import hooked
from gradfree.chains.site import Site
from gradfree.chains.solving import Attachment
from gradfree.depth.borders import Aside, Entry, Exit, Past, aside_node, exit_node, own_nodes
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link
from gradfree.depth.ports import Port, port_of, replaced, tensors_in
from gradfree.depth.recording import Recording, has_hooks
from gradfree.errors import ChainError, refuse
from gradfree.torchside.graph import Reached, may_write, older, walk
from gradfree.torchside.guards import recomputed
from gradfree.torchside.sharding import is_spread, sharded


class _Call(NamedTuple):
    """What a block's pre-hook leaves for its forward hook."""

    recording: Recording
    before: Tensor
    entries: tuple[tuple[int | None, GradientEdge], ...]
    versions: tuple[tuple[int | None, Tensor, int], ...]
    begun: bool


class RecordedChain:
    """One chain of a model with an engine attached.

    Args:
        attachment: solves for the gradients.
        site: the chain.
    """

    def __init__(self, attachment: Attachment, site: Site):
        self.attachment = attachment
        self.blocks, self.inside, self.splits = site.blocks, site.inside, site.splits
        self.mixing = Mixing()
        self._modules = list(dict.fromkeys(m for block in self.blocks.values() for m in block.modules()))

    def record(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Put the hooks on the blocks; return their handles."""
        handles = []
        for path, block in self.blocks.items():
            recorder = BlockRecorder(self, path, port_of(block))
            # Behind every pre-hook and before every forward hook that the user has: these belong to the model.
            handles.append(block.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(block.register_forward_hook(recorder.leave, prepend=True))
        return handles

    def begin(self, state: Tensor, inputs: Sequence[Tensor]) -> Recording:
        """Return the recording of a pass that starts from ``state``."""
        parameters = self.trainable()
        around = (p for p in self.attachment.around() if p.requires_grad and not is_spread(p))
        return Recording(self, list(dict.fromkeys([*parameters, *around])), inputs)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of all blocks that need a gradient, each once."""
        found = (p for module in self._modules for p in module._parameters.values())
        return list(dict.fromkeys(p for p in found if p is not None and p.requires_grad))

    def split(self, path: str, reason: str, remedy: str) -> None:
        """Note that the block at ``path`` does not go on the chain of the block before it.

        Args:
            path: of the block.
            reason: why.
            remedy: what to do about it, for engines that take none but whole chains.
        """
        self.splits[path] = reason


class BlockRecorder:
    """The hooks of one block."""

    def __init__(self, chain: RecordedChain, path: str, port: Port):
        self.chain, self.path, self.port = chain, path, port
        self.call: _Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a call that an exception has cut short: its tensors cannot be copied."""
        return {**self.__dict__, "call": None}

    def enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the block inputs without history and join the pass that its state belongs to, or start one."""
        self.call = None
        # A checkpoint around the block runs it again for what autograd has kept of the pass; that is recorded already.
        if not torch.is_grad_enabled() or recomputed():
            return None
        if getattr(block, "_is_replica", False):
            raise ChainError(
                f"{self.path} runs as one of several replicas of nn.DataParallel, which share the engine's hooks. Use "
                "DistributedDataParallel."
            )
        state, others, put = self.port.take(args, kwargs)
        needed = state is not None and state.requires_grad
        if not needed and not others and not any(p.requires_grad for p in block.parameters()):
            return None
        if state is None:
            raise ChainError(
                f"{self.path} was called without a state: its first argument must be a tensor. If another one is the "
                f"state, say so with gradfree.register_port({type(block).__name__}, ...)."
            )
        recording, before, begun = self._join(state, others)
        recording.before(self.path, block, state)
        entries: list[tuple[int | None, GradientEdge]] = []
        versions: list[tuple[int | None, Tensor, int]] = []

        def entered(tensor: Tensor, number: int | None) -> Tensor:
            local: Tensor = Entry.apply(
                weakref.ref(recording),
                self.path,
                len(recording.links),
                number,
                recording.anchor,
                tensor.detach().requires_grad_(),
            )
            entries.append((number, get_gradient_edge(local)))
            versions.append((number, tensor, tensor._version))
            return local

        local = entered(state, None) if needed else state
        given = [local if t is state else self._given(recording, t, entered) for t in others]
        self.call = _Call(recording, before, tuple(entries), tuple(versions), begun)
        return put(local, given)

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
        in_place = self._changed(call)
        if not state.requires_grad:
            return None
        beside = [t for t in tensors_in(out) if t.requires_grad and not _shares_memory(t, state)]
        graph = walk([state, *beside], {edge.node for _, edge in call.entries})
        if strange := self._strange(graph, call.recording):
            self.chain.split(self.path, f"it uses {strange}: autograd goes through it", _OUTSIDER.format(what=strange))
            entries = [edge.node for _, edge in call.entries if edge.node in graph.stops]
            return self.port.join(Past.apply(self.path, entries, call.before, state), rest)
        recording, index = call.recording, len(call.recording.links)
        recording.uncut |= bool(call.entries) and older(graph.nodes, call.entries[0][1].node)
        recording.add(self._link(block, state, beside, graph, call, in_place))
        after = Exit.apply(recording, index, call.before, state.detach())
        recording.states.append(weakref.ref(after))
        new = {id(t): Aside.apply(recording, index, n, after, t.detach()) for n, t in enumerate(beside)}
        return replaced(self.port.join(after, rest), new) if new else self.port.join(after, rest)

    def _link(
        self, block: nn.Module, state: Tensor, beside: Sequence[Tensor], graph: Reached, call: _Call, in_place: bool
    ) -> Link:
        # An edge keeps its node alive only from torch 2.9 on; before, it dangles where no output leads to it.
        entries = tuple((number, edge) for number, edge in call.entries if edge.node in graph.stops)
        of_state = walk([state], {edge.node for _, edge in entries}).stops if beside else graph.stops
        reached = [(number, edge) for number, edge in entries if edge.node in of_state]
        numbers = call.recording.numbers
        return Link(
            self.path,
            block,
            state,
            next((edge for number, edge in reached if number is None), None),
            tuple((number, edge) for number, edge in reached if number is not None),
            {numbers[id(leaf)]: leaf for leaf in graph.leaves},
            state.grad_fn,
            may_write(graph.nodes),
            tuple(beside),
            entries,
            in_place,
        )

    def _join(self, state: Tensor, others: Sequence[Tensor]) -> tuple[Recording, Tensor, bool]:
        """Return the recording that ``state`` belongs to, the node's output to continue from, and whether it is new."""
        node: Any = state.grad_fn
        recording = node.recording if isinstance(node, exit_node) else None
        if recording is not None and recording.chain is self.chain:
            problem = self._cannot_go_on(recording, node.index, state, others)
            if problem is None:
                return recording, state, False
            self.chain.split(self.path, *problem)
        else:
            # Both may have come since the engine was attached.
            refuse(sharded(self.chain.inside))
            refuse(hooked(self.chain.inside))
            if isinstance(node, aside_node) and node.recording.chain is self.chain:
                self.chain.split(self.path, *_NOT_THE_STATE)
            elif state.requires_grad and self.path != next(iter(self.chain.blocks)):
                self.chain.split(self.path, *_BETWEEN)
        recording = self.chain.begin(state, [t for t in others if t is not state])
        return recording, recording.start(state), True

    def _cannot_go_on(
        self, recording: Recording, index: int, state: Tensor, others: Sequence[Tensor]
    ) -> tuple[str, str] | None:
        """Return why the block cannot be the next link of ``recording``, and what to do; ``None`` if it can."""
        last = recording.links[index].path if index < len(recording.links) else ""
        if index != len(recording.links) - 1:
            return f"the output of {last} has been used by another block: the blocks branch", _BRANCHING
        if has_hooks(state):
            return f"the output of {last} has a gradient hook or retain_grad(), which sees its whole gradient", _HOOKED
        for tensor in others:
            if tensor is not state and _number(recording, tensor) is None:
                graph = walk([_uncut(recording, tensor)])
                own = any(isinstance(node, own_nodes) for node in graph.nodes)
                if own or any(id(leaf) not in recording.numbers for leaf in graph.leaves):
                    what = "depends on a state" if own else "needs a gradient"
                    shape = tuple(tensor.shape)
                    return f"it was given a tensor of shape {shape} that {what} and that no block before it was", _INPUT
        return None

    def _given(self, recording: Recording, tensor: Tensor, entered: Any) -> Tensor:
        """Return what to give the block in place of an input: cut if it is the chain's, its own with its history."""
        number = _number(recording, tensor)
        return _uncut(recording, tensor) if number is None else entered(tensor, number)

    def _changed(self, call: _Call) -> bool:
        """Tell whether the block has changed its state in place; refuse what is wrong then."""
        changed = [number for number, tensor, version in call.versions if tensor._version != version]
        if not changed:
            return False
        # What the outer graph has computed with the tensor that the pass began with, nobody sees.
        if call.begun or changed != [None]:
            raise ChainError(
                f"{self.path} modifies its input in place: other uses of that state would get a wrong gradient. Use "
                "the out-of-place operation (nn.ReLU(inplace=False), x = x + y)."
            )
        return True

    def _strange(self, graph: Reached, recording: Recording) -> str | None:
        """Return what the block's graph leads to that is no part of the recording."""
        for leaf in graph.leaves:
            if id(leaf) not in recording.numbers:
                return f"a tensor of shape {tuple(leaf.shape)} that needs a gradient"
        if any(isinstance(node, own_nodes) for node in graph.nodes):
            return "another state"
        return None


_BETWEEN = (
    "it was given what the model, a hook or a reentrant checkpoint computes, not a block's output",
    "it was not given the output of the block before it. Move what is computed between the blocks into one, or leave "
    "the layers from there on out of the chain: chains=[...].",
)
_NOT_THE_STATE = (
    "its first argument is what a block returned beside its state; gradfree.register_port tells which is the state",
    "its first argument is what a block returned beside its state. Tell which is the state by gradfree.register_port.",
)
_BRANCHING = "the blocks branch. Leave the branching ones out of the chain: chains=[...] names those to use."
_HOOKED = "the state before it has a gradient hook or retain_grad(). Remove that while the engine is attached."
_INPUT = "inputs that need a gradient must be the same for every block. Detach this one, or leave the block out."
_OUTSIDER = (
    "it uses {what} that is neither an argument of its call nor a parameter of the model when the engine was "
    "attached. Pass it as an argument, or register it on the block and then attach."
)


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
    if isinstance(node, aside_node) and node.recording is recording:
        original: Tensor = recording.links[node.index].beside[node.number]
        return original
    return tensor


def _shares_memory(tensor: Tensor, state: Tensor) -> bool:
    return tensor is state or tensor.untyped_storage()._cdata == state.untyped_storage()._cdata
