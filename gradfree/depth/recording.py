"""Recording a forward pass through a chain of modules so that ``loss.backward()`` asks the engine for gradients.

The model runs its blocks itself; hooks on them cut autograd's graph at the block borders:

- *Start*, before the first block, takes the initial state and every trainable parameter of the chain. Autograd
  runs it last, when every direct cotangent is known: it lets the engine solve and returns all gradients.
- *Entry*, before each block, gives it a state without history: the block builds a graph of its own.
- *Exit*, behind each block, hands the state on. Its backward only collects the direct cotangent e_i.

No pass is kept on the modules: a state tensor's own graph node tells which pass it belongs to, so passes may
overlap and a model may be called several times before one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.refusals import hooked
from gradfree.chains.site import Site
from gradfree.chains.solving import Attachment
from gradfree.depth.chain import DepthChain
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link
from gradfree.depth.ports import Port, port_of
from gradfree.errors import ChainError, refuse
from gradfree.torchside.graph import may_write, walk
from gradfree.torchside.guards import check_finite, refuse_second_derivatives
from gradfree.torchside.hooks import spare_hooks
from gradfree.torchside.sharding import sharded


class Recording:
    """What one forward pass through a chain leaves behind for its backward pass."""

    def __init__(self, chain: RecordedChain, parameters: Sequence[Tensor], inputs: Sequence[Tensor]):
        self.chain = chain
        self.parameters = parameters
        self.numbers = {id(p): n for n, p in enumerate(parameters)}
        self.inputs = [(tensor, get_gradient_edge(tensor)) for tensor in inputs]
        self.links: list[Link] = []
        self.states: list[weakref.ref[Tensor]] = []
        self.direct: list[Cotangent] = []
        self.backward = -1
        self.freed = False

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Note that ``block`` is about to run on ``state``."""

    def add(self, link: Link) -> None:
        """Keep what ``link`` has left."""
        self.links.append(link)

    def collect(self, exit_node: Any, cotangent: Cotangent) -> None:
        """Keep the direct cotangent of the state behind ``exit_node``."""
        self._begin(exit_node)
        check_finite([cotangent], self.links[exit_node.index].path)
        # Autograd may hand the same tensor on to a function that changes it in place, long before it is used here.
        self.direct[exit_node.index] = None if cotangent is None else cotangent.clone()

    def _begin(self, node: Any) -> None:
        """Forget what another backward pass has left; refuse one that will not reach the chain's start."""
        if self.freed:
            raise ChainError(
                "Trying to backward through a chain a second time: its graphs are freed. Call the first backward with "
                "retain_graph=True."
            )
        backward = torch._C._current_graph_task_id()
        if backward == self.backward:
            return
        self.backward, self.direct = backward, [None] * len(self.links)
        while not isinstance(node, _start_node):
            node = node.next_functions[0][0]
        if not torch._C._will_engine_execute_node(node):
            raise ChainError(
                f"torch.autograd.grad was asked for the gradient of a state between {self.links[0].path} and "
                f"{self.links[-1].path}: inside a chain there is its direct cotangent only. Detach the engine, or ask "
                "for gradients of parameters or of what lies before the chain."
            )

    def solve(self, start_node: Any) -> tuple[Cotangent, ...]:
        """Return the gradients of the initial state, the other inputs and the parameters."""
        self._begin(start_node)
        for link, state in zip(self.links[:-1], self.states, strict=False):
            _refuse_hooks(state(), link.path)
        for link in self.links:
            _refuse_changed(link)
        direct, self.direct = self.direct, []
        last = max((i for i, e in enumerate(direct) if e is not None), default=None)
        if last is None:
            return (None,) * (1 + len(self.inputs) + len(self.parameters))
        links, keep = self.links[: last + 1], _keep_graph()
        gradients = self.chain.attachment.solve(self.linearise(links, keep), direct[: last + 1])
        self.chain.attachment.solved.update(link.path for link in links)
        if not keep:
            self.links, self.freed = [], True
        return gradients.initial, *gradients.inputs, *gradients.parameters

    def linearise(self, links: Sequence[Link], keep_graph: bool) -> DepthChain:
        """Return what the engine sees of the pass: ``links``, those that the loss has reached."""
        memory, mixing = self.chain.attachment.memory, self.chain.mixing
        return DepthChain(links, self.parameters, len(self.inputs), keep_graph, memory, mixing)


class _Context(FunctionCtx):
    recording: Recording
    index: int
    path: str


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, recording: Recording, state: Tensor, *inputs_and_parameters: Tensor) -> Tensor:
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        # Only for the order of the nodes. Not the state itself: of whole numbers (tokens) it would need no gradient.
        return state.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: _Context, _: Cotangent) -> tuple[Cotangent, ...]:
        refuse_second_derivatives()
        recording = ctx.recording
        initial, *gradients = recording.solve(ctx)
        given = *(tensor for tensor, _ in recording.inputs), *recording.parameters
        spare_hooks(tensor for tensor, g in zip(given, gradients, strict=True) if g is None)
        return None, initial, *gradients


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, recording: Recording, before: Tensor, state: Tensor) -> Tensor:
        ctx.recording = recording
        ctx.index = len(recording.links) - 1
        ctx.set_materialize_grads(False)
        return state.detach()

    @staticmethod
    def backward(ctx: _Context, cotangent: Cotangent) -> tuple[None, ...]:
        ctx.recording.collect(ctx, cotangent)
        return None, None, None


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, path: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.path = path
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: _Context, *_: Tensor) -> tuple[None, ...]:
        # The engine's own passes stop at this node; only a graph that left the block elsewhere runs it.
        raise ChainError(_LEFT_THE_BLOCK.format(path=ctx.path))


_LEFT_THE_BLOCK = (
    "the loss uses a tensor from inside {path} (one of its inputs, a loss or feature computed in it, or what it "
    "returns beside the state) that is not the block's output: its gradient cannot pass the chain. Use the states that "
    "the blocks return instead, or leave the blocks around {path} out of the chain."
)


def refuse_entries(loss: Tensor) -> None:
    """Refuse a loss on tensors from inside blocks beforehand: ``torch.autograd.grad`` would not run their nodes."""
    entries: list[Any] = [node for node in walk([loss]).nodes if isinstance(node, _Entry._backward_cls)]
    if entries:
        raise ChainError(_LEFT_THE_BLOCK.format(path=entries[0].path))


class _Call(NamedTuple):
    """What a block's pre-hook leaves for its forward hook."""

    recording: Recording
    before: Tensor
    state: GradientEdge | None
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

    def begin(self, state: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> Recording:
        """Return the recording of a pass that starts from ``state``."""
        return Recording(self, parameters, inputs)

    def trainable(self) -> list[Tensor]:
        """Return the parameters of all blocks that need a gradient, each once."""
        found = (p for module in self._modules for p in module._parameters.values())
        return list(dict.fromkeys(p for p in found if p is not None and p.requires_grad))


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
        live = [state, *others] if needed else others
        local: tuple[Tensor, ...] = ()
        if live:
            local = _Entry.apply(self.path, *(t.detach().requires_grad_() for t in live))
        edges = [get_gradient_edge(t) for t in local]
        entry = edges.pop(0) if needed else None
        inputs = tuple((self._number(recording, t), edge) for t, edge in zip(others, edges, strict=True))
        self.call = _Call(recording, before, entry, inputs, tuple((t, t._version) for t in live))
        return put(local[0], local[1:]) if needed else put(state, local)

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
        reaches_inputs, writes, parameters = self._graph(state, call)
        # An edge keeps its node alive only from torch 2.9 on; before, it dangles where the output does not lead to it.
        entry, inputs = (call.state, call.inputs) if reaches_inputs else (None, ())
        recording.add(Link(self.path, block, state, entry, inputs, parameters, state.grad_fn, writes))
        state_after = _Exit.apply(recording, call.before, state.detach())
        recording.states.append(weakref.ref(state_after))
        return self.port.join(state_after, rest)

    def _join(self, state: Tensor, others: Sequence[Tensor]) -> tuple[Recording, Tensor]:
        """Return the recording that ``state`` belongs to, and the node's output to continue from."""
        node: Any = state.grad_fn
        recording = node.recording if isinstance(node, _exit_node) else None
        if recording is not None and recording.chain is self.chain:
            self._check_order(recording, node.index, state)
            return recording, state
        # Both may have come since the engine was attached.
        refuse(sharded(self.chain.inside))
        refuse(hooked(self.chain.inside))
        if any(isinstance(t.grad_fn, _exit_node) and t.grad_fn.recording.chain is self.chain for t in others):
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
        return recording, _Start.apply(recording, state, *others, *parameters)

    def _check_order(self, recording: Recording, index: int, state: Tensor) -> None:
        if any(link.path == self.path for link in recording.links):
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
        for n, (known, edge) in enumerate(recording.inputs):
            # A change in place gives the same tensor another history.
            if tensor is known and get_gradient_edge(tensor) == edge:
                return n
        raise ChainError(
            f"{self.path} was given a tensor of shape {tuple(tensor.shape)} that needs a gradient and that the first "
            "block was not given, or that has been changed in place since. Inputs that need a gradient must be the "
            "same for every block; detach this one, or leave the block out of the chain."
        )

    def _graph(self, out: Tensor, call: _Call) -> tuple[bool, bool, dict[int, Tensor]]:
        """Return whether the block's graph uses its inputs, whether it may write, and the parameters that it uses.

        Refuses any other tensor that needs a gradient: that would be lost without a word. Done on every pass, since
        a block may take another branch.
        """
        edges = (call.state, *(edge for _, edge in call.inputs))
        graph = walk([out], {edge.node for edge in edges if edge is not None})
        numbers = call.recording.numbers
        strange = [f"a tensor of shape {tuple(leaf.shape)}" for leaf in graph.leaves if id(leaf) not in numbers]
        strange += ["another state" for node in graph.nodes if isinstance(node, _own_nodes)]
        if strange:
            raise ChainError(
                f"{self.path} uses {strange[0]} that needs a gradient and is neither an argument of its call nor a "
                "parameter that the chain's blocks had when the engine was attached. Pass it as an argument, or "
                "register it on the block and then attach."
            )
        return bool(graph.stops), may_write(graph.nodes), {numbers[id(leaf)]: leaf for leaf in graph.leaves}


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


_start_node: Any = _Start._backward_cls
_exit_node: Any = _Exit._backward_cls
_own_nodes: Any = (_Start._backward_cls, _Entry._backward_cls, _Exit._backward_cls)


def _keep_graph() -> bool:
    """Tell whether the running backward pass was called with ``retain_graph=True``."""
    query = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if query is None else query()
