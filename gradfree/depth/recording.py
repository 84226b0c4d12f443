"""Recording a forward pass through a chain of modules so that ``loss.backward()`` asks the engine for gradients.

The model runs its blocks itself; hooks on them cut autograd's graph at the block borders: see :mod:`.borders`.

No pass is kept on the modules: a state tensor's own graph node tells which pass it belongs to, so passes may
overlap and a model may be called several times before one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.refusals import hooked
from gradfree.chains.site import Site
from gradfree.chains.solving import Attachment
from gradfree.depth.borders import BORDERS, EXITS, Entries, Exits, Outputs, Start, edge
from gradfree.depth.chain import DepthChain
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link
from gradfree.depth.ports import Port, port_of
from gradfree.errors import ChainError, refuse
from gradfree.torchside.graph import may_write, walk
from gradfree.torchside.guards import check_finite
from gradfree.torchside.sharding import sharded


class _Handed(NamedTuple):
    """A state that was handed on.

    Attributes:
        state: as the model has it.
        seen: the same values, with the model's count of changes in place.
        version: that count, at first.
    """

    state: weakref.ref[Tensor]
    seen: Tensor
    version: int


class Recording:
    """What one forward pass through a chain leaves behind for its backward pass."""

    ahead = True
    """Whether a node may serve several blocks, which keeps states in memory until the backward pass."""

    def __init__(self, chain: RecordedChain, parameters: Sequence[Tensor], inputs: Sequence[Tensor]):
        self.chain = chain
        self.parameters = parameters
        self.numbers = {id(p): n for n, p in enumerate(parameters)}
        self.inputs = [(tensor, get_gradient_edge(tensor)) for tensor in inputs]
        self.start: weakref.ref[Any]
        self.links: list[Link] = []
        self.given: list[Tensor | None] = []
        self.handed: list[_Handed] = []
        self.paths: set[str] = set()
        self.direct: list[Cotangent] = []
        self.backward = -1
        self.freed = False
        self._exits, self._entries = Outputs(), Outputs()
        self._entered: list[str] = []

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Note that ``block`` is about to run on ``state``."""

    def add(self, link: Link) -> None:
        """Keep what ``link`` has left."""
        self.links.append(link)

    def more(self) -> int:
        """Return for how many blocks to come a node is to serve: as many again, so that few nodes serve many blocks."""
        return min(len(self.links), len(self.chain.blocks) - len(self.links) - 1) if self.ahead else 0

    def enter(self, path: str, state: Tensor) -> Tensor:
        """Return ``state`` without history, for the block at ``path``."""
        local = self._entries.fill(state)
        if local is None:
            self._entered = []
            local, *rest = Entries.apply(self._entered, self.more(), state.detach().requires_grad_())
            self._entries = Outputs(rest)
        self._entered.append(path)
        return local

    def leave(self, link: Link, given: Tensor | None, before: Tensor) -> Tensor:
        """Keep ``link``, whose block was ``given`` a state; return its own for the model to go on with."""
        more = self.more()
        self.add(link)
        self.given.append(given)
        self.paths.add(link.path)
        out = link.out.detach()
        state = self._exits.fill(out)
        if state is None:
            guard, state, *rest = Exits.apply(self, len(self.links) - 1, before, out, more)
            # Of all hooks, those on tensors run even where the node itself will not.
            guard.register_hook(self._check_start)
            self._exits = Outputs(rest)
        self.handed.append(_Handed(weakref.ref(state), state.detach() if self.ahead else out, state._version))
        return state

    def _check_start(self, _: Cotangent) -> None:
        """Refuse a backward pass that will not reach the chain's start."""
        start = self.start()
        assert start is not None  # The graph that is walked leads to it.
        if not torch._C._will_engine_execute_node(start):
            raise ChainError(
                f"torch.autograd.grad was asked for the gradient of a state between {self.links[0].path} and "
                f"{self.links[-1].path}: inside a chain there is its direct cotangent only. Detach the engine, or ask "
                "for gradients of parameters or of what lies before the chain."
            )

    def begin_backward(self) -> None:
        """Forget what another backward pass has left; refuse one through graphs that are freed."""
        if self.freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its graphs are freed. Call the first backward with "
                "retain_graph=True."
            )
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:
            self.backward, self.direct = backward, [None] * len(self.links)

    def collect(self, index: int, cotangents: Sequence[Cotangent]) -> None:
        """Keep the direct cotangents of the states from that of link ``index`` on."""
        self.begin_backward()
        for i, cotangent in enumerate(cotangents, index):
            if cotangent is not None:
                check_finite([cotangent], self.links[i].path)
                # Autograd may hand the same tensor on to a function that changes it in place, long before it is used.
                self.direct[i] = cotangent.clone()

    def solve(self) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""
        self.begin_backward()
        self._exits, self._entries = Outputs(), Outputs()
        for link, handed in zip(self.links[:-1], self.handed, strict=False):
            _refuse_hooks(handed.state(), link.path)
        for link in self.links:
            _refuse_changed(link)
        self._follow_changes()
        direct, self.direct = self.direct, []
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is None:
            return (None,) * (1 + len(self.inputs) + len(self.parameters))
        links, keep = self.links[: last + 1], _keep_graph()
        gradients = self.chain.attachment.solve(self.linearise(links, keep), direct[: last + 1])
        self.chain.attachment.solved.update(link.path for link in links)
        if not keep:
            self.links, self.given, self.handed, self.freed = [], [], [], True
        return gradients.initial, *gradients.inputs, *gradients.parameters

    def _follow_changes(self) -> None:
        """Let the blocks' graphs know of states that the model has changed in place: autograd refuses what it needs."""
        for i, (_, seen, version) in enumerate(self.handed):
            if seen._version != version:
                same = (self.links[i].out, *self.given[i + 1 : i + 2])
                increment_version([tensor for tensor in same if tensor is not None])

    def linearise(self, links: Sequence[Link], keep_graph: bool) -> DepthChain:
        """Return what the engine sees of the pass: ``links``, those that the loss has reached."""
        memory, mixing = self.chain.attachment.memory, self.chain.mixing
        return DepthChain(links, self.parameters, len(self.inputs), keep_graph, memory, mixing)


class _Call(NamedTuple):
    """What a block's pre-hook leaves for its forward hook."""

    recording: Recording
    before: Tensor
    given: Tensor | None
    inputs: tuple[tuple[int, GradientEdge], ...]
    versions: tuple[tuple[Tensor, int], ...]


class RecordedChain:
    """One chain of a model with an engine attached.

    Args:
        attachment: solves for the gradients.
        site: the chain.
    """

    def __init__(self, attachment: Attachment, site: Site):
        self.attachment = attachment
        self.blocks, self.inside = site.blocks, site.inside
        self.mixing = Mixing()
        modules = dict.fromkeys(m for block in self.blocks.values() for m in block.modules())
        # What every pass looks at, in one place: to go through all modules for it costs more than small blocks do.
        self._parameters = [module._parameters for module in modules if module._parameters]
        self._hooks = [h for m in self.inside.values() for h in (m._backward_hooks, m._backward_pre_hooks)]

    def record(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Put the hooks on the blocks; return their handles."""
        handles = []
        for path, block in self.blocks.items():
            recorder = BlockRecorder(self, path, port_of(block))
            # Behind every pre-hook and before every forward hook that the user has: these belong to the model.
            handles.append(block.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(block.register_forward_hook(recorder.leave, prepend=True))
        return handles

    def begin(self, state: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> Recording:
        """Return the recording of a pass that starts from ``state``."""
        return Recording(self, parameters, inputs)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of all blocks that need a gradient, each once."""
        found = (p for own in self._parameters for p in own.values() if p is not None and p.requires_grad)
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Refuse what may have come since the engine was attached: sharded modules, and backward hooks."""
        refuse(sharded(self.inside))
        if any(self._hooks):
            refuse(hooked(self.inside))


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
        if not torch.is_grad_enabled():
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
        recording, before = self._join(state, others)
        recording.before(self.path, block, state)
        given = recording.enter(self.path, state) if needed else None
        local: Sequence[Tensor] = ()
        if others:
            local = Entries.apply([self.path] * len(others), 0, *(t.detach().requires_grad_() for t in others))
        inputs = tuple((self._number(recording, t), edge(x)) for t, x in zip(others, local, strict=True))
        live = local if given is None else (given, *local)
        self.call = _Call(recording, before, given, inputs, tuple((t, t._version) for t in live))
        return put(state if given is None else given, local)

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
        if any(tensor._version != version for tensor, version in call.versions):
            raise ChainError(
                f"{self.path} modifies its input in place: other uses of that state would get a wrong gradient. Use "
                "the out-of-place operation (nn.ReLU(inplace=False), x = x + y)."
            )
        if not state.requires_grad:
            return None
        recording = call.recording
        entry = None if call.given is None else edge(call.given)
        reaches_inputs, writes, parameters = self._graph(state, recording, [entry, *(e for _, e in call.inputs)])
        # An edge keeps its node alive only where the output leads to it.
        entry, inputs = (entry, call.inputs) if reaches_inputs else (None, ())
        link = Link(self.path, block, state, entry, inputs, parameters, state.grad_fn, writes)
        return self.port.join(recording.leave(link, call.given, call.before), rest)

    def _join(self, state: Tensor, others: Sequence[Tensor]) -> tuple[Recording, Tensor]:
        """Return the recording that ``state`` belongs to, and the node's output to continue from."""
        node: Any = state.grad_fn
        recording = node.recording if isinstance(node, EXITS) else None
        if recording is not None and recording.chain is self.chain:
            self._check_order(recording, node.index + state.output_nr - 1, state)
            return recording, state
        self.chain.check()
        if any(isinstance(t.grad_fn, EXITS) and t.grad_fn.recording.chain is self.chain for t in others):
            raise ChainError(
                f"{self.path} was given a state of the chain, but not as its first argument. Call blocks as "
                "block(state, ...), or name the argument with gradfree.register_port."
            )
        if state.requires_grad and self.path != next(iter(self.chain.blocks)):
            raise ChainError(
                f"{self.path} was not given the output of the block before it: the model, a hook or a checkpoint "
                "around the block computes something between the blocks, or that block does not return its state first "
                "(gradfree.register_port tells where it is). Move that into a block, or leave this container out of "
                "the chains: chains=[...] names the ones to use."
            )
        parameters = self.chain.trainable()
        recording = self.chain.begin(state, parameters, others)
        return recording, Start.apply(recording, state, *others, *parameters)

    def _check_order(self, recording: Recording, index: int, state: Tensor) -> None:
        if self.path in recording.paths:
            raise ChainError(
                f"{self.path} runs twice in one forward pass. A chain runs each block once; to apply a block "
                "several times, give each use a module of its own (they may share parameters). A checkpoint belongs "
                "inside a block, not around it."
            )
        if index != len(recording.links) - 1:
            raise ChainError(
                f"{self.path} was given the output of {recording.links[index].path}, which "
                f"{recording.links[index + 1].path} has already used: the blocks branch. Leave the branching blocks "
                "out of the chain: chains=[...] names the containers to use."
            )
        _refuse_hooks(state, recording.links[index].path)

    def _number(self, recording: Recording, tensor: Tensor) -> int:
        for n, (known, origin) in enumerate(recording.inputs):
            # A change in place gives the same tensor another history.
            if tensor is known and get_gradient_edge(tensor)[:2] == origin[:2]:
                return n
        raise ChainError(
            f"{self.path} was given a tensor of shape {tuple(tensor.shape)} that needs a gradient and that the first "
            "block was not given, or that has been changed in place since. Inputs that need a gradient must be the "
            "same for every block; detach this one, or leave the block out of the chain."
        )

    def _graph(
        self, out: Tensor, recording: Recording, own: Sequence[GradientEdge | None]
    ) -> tuple[bool, bool, dict[int, Tensor]]:
        """Return whether the block's graph uses its ``own`` inputs, whether it may write, and the parameters it uses.

        Refuses any other tensor that needs a gradient: that would be lost without a word. Done on every pass, since
        a block may take another branch.
        """
        edges = {(e.node, e.output_nr) for e in own if e is not None}
        graph = walk([out], {node for node, _ in edges})
        numbers = recording.numbers
        strange = [f"a tensor of shape {tuple(leaf.shape)}" for leaf in graph.leaves if id(leaf) not in numbers]
        if not graph.stops <= edges or not graph.kinds.isdisjoint(BORDERS):
            strange.append("another state")
        if strange:
            raise ChainError(
                f"{self.path} uses {strange[0]} that needs a gradient and is neither an argument of its call nor a "
                "parameter that the chain's blocks had when the engine was attached. Pass it as an argument, or "
                "register it on the block and then attach."
            )
        return bool(graph.stops), may_write(graph.kinds), {numbers[id(leaf)]: leaf for leaf in graph.leaves}


def _refuse_hooks(state: Tensor | None, path: str) -> None:
    if state is not None and (state._backward_hooks or state.retains_grad):
        raise ChainError(
            f"the output of {path} has a gradient hook or retain_grad(): it would see the state's direct cotangent "
            "only, not its whole gradient. Remove it while an engine is attached."
        )


def _refuse_changed(link: Link) -> None:
    if link.out.grad_fn is not link.root:
        raise ChainError(
            f"the output of {link.path} was changed in place through another tensor that shares its memory, returned "
            "beside it or kept by the block: the gradient of that change would be lost. Use the out-of-place operation "
            "(y = y + x, not y += x)."
        )


def _keep_graph() -> bool:
    """Tell whether the running backward pass was called with ``retain_graph=True``."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()
