"""The hooks of a chain's blocks: what a block is given, what becomes of its output, whether it runs with a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradfree.chains.site import Removable
from gradfree.depth.batched_chain import Ran
from gradfree.depth.borders import BORDERS, EXITS, Entries, Start, edge
from gradfree.depth.link import Link
from gradfree.depth.ports import Port, port_of
from gradfree.depth.recording import RecordedChain, Recording, refuse_hooks
from gradfree.errors import ChainError
from gradfree.torchside.graph import may_write, walk
from gradfree.torchside.unsaved import Unsaved


def record(chain: RecordedChain) -> list[Removable]:
    """Put the hooks on the blocks of ``chain``; return what to take off again."""
    handles: list[Removable] = []
    for path, block in chain.blocks.items():
        recorder = BlockRecorder(chain, path, port_of(block))
        if chain.batching is not None and "forward" not in vars(block):
            handles += [WithoutGraph(recorder, block), Unsaved(block, {"forward"})]
        # Behind every pre-hook and before every forward hook that the user has: these belong to the model.
        handles.append(block.register_forward_pre_hook(recorder.enter, with_kwargs=True))
        handles.append(block.register_forward_hook(recorder.leave, prepend=True))
    return handles


class _Call(NamedTuple):
    """What a block's pre-hook leaves for its forward hook."""

    recording: Recording
    before: Tensor
    given: Tensor
    entry: GradientEdge | None
    inputs: tuple[tuple[int, GradientEdge], ...]
    versions: tuple[tuple[Tensor, int], ...]
    without_graph: bool = False


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
        setting = recording.setting
        if setting is not None:
            plain = len(args) == 1 and not kwargs and len(block._forward_pre_hooks) == len(block._forward_hooks) == 1
            if not plain:
                setting.apart[self.path] = "it is given more than its state, or has hooks of its own"
            elif setting.is_batched(self.path):
                self.call = _Call(recording, before, state, None, (), ((state, state._version),), True)
                return None
        given = recording.enter(self.path, state) if needed else state
        local: Sequence[Tensor] = ()
        if others:
            local = Entries.apply([self.path] * len(others), 0, *(t.detach().requires_grad_() for t in others))
        inputs = tuple((self._number(recording, t), edge(x)) for t, x in zip(others, local, strict=True))
        entry, live = (edge(given), (given, *local)) if needed else (None, local)
        self.call = _Call(recording, before, given, entry, inputs, tuple((t, t._version) for t in live))
        return put(given, local)

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
        recording, entry = call.recording, call.entry
        if call.without_graph:
            return self.port.join(self._leave_without_graph(block, state, rest, call), rest)
        if not state.requires_grad:
            return None
        if rest is not None and recording.setting is not None:
            recording.setting.apart[self.path] = "it returns more than its state"
        reaches_inputs, writes, parameters = self._graph(state, recording, [entry, *(e for _, e in call.inputs)])
        # An edge keeps its node alive only where the output leads to it.
        entry, inputs = (entry, call.inputs) if reaches_inputs else (None, ())
        link = Link(self.path, block, state, entry, inputs, parameters, state.grad_fn, writes)
        return self.port.join(recording.leave(link, call.given, call.before), rest)

    def _leave_without_graph(self, block: nn.Module, state: Tensor, rest: Any, call: _Call) -> Tensor:
        if rest is not None:
            raise ChainError(
                f"{self.path} returns more than its state now, which it did not in the pass before. Attach with "
                "batched=False."
            )
        # Changes in place of the state that it was given are those of what this has.
        x = call.recording.handed[-1].seen if call.recording.handed else call.given.detach()
        return call.recording.leave(Ran(self.path, block, state.detach(), x), call.given, call.before)

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
        if self.chain.batching is not None and not others:
            recording.setting = self.chain.batching.begin(state)
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
        refuse_hooks(state, recording.links[index].path)

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


class WithoutGraph:
    """Runs a block without a graph where its recorder has said so, in place of its ``forward``.

    Not by a switch in its hooks: an exception would leave that as it is.
    """

    def __init__(self, recorder: BlockRecorder, block: nn.Module):
        self._recorder, self._block, self._forward = recorder, block, block.forward
        block.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward."""
        call = self._recorder.call
        if call is None or not call.without_graph:
            return self._forward(*args, **kwargs)
        # Quicker than torch.no_grad(), which this is.
        torch._C._set_grad_enabled(False)
        try:
            return self._forward(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    def remove(self) -> None:
        """Give the block its own forward back."""
        del self._block.forward
