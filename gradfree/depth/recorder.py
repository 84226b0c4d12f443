"""Hooks on the blocks of a chain: they cut autograd's graph around each call and record the call in a pass.

A block that cannot be the next link of its predecessor's pass starts a new pass, and the site stores the reason. The
outer graph connects the passes, so the gradients stay exact. A block that would get a wrong gradient raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import exc_info
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradfree.chains.refusals import problems_of_backward_hooks
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.depth.block_jacobians import Mixing
from gradfree.depth.depth_pass import DepthPass
from gradfree.depth.link import Link, refuse_hooks
from gradfree.depth.nodes import EXIT
from gradfree.depth.ports import Port, port_of, replaced, tensors_in
from gradfree.errors import CALLS_ITSELF, ChainError, refuse
from gradfree.torchside.guards import refuse_transforms
from gradfree.torchside.hooks import has_hooks
from gradfree.torchside.private import changes, recomputed, uncompiled
from gradfree.torchside.sharding import is_dtensor, problems_of_shards


class _Call(NamedTuple):
    """A call of a block that is running.

    Attributes:
        recording: the pass that the call belongs to.
        before: what the block's Exit node follows in the outer graph: the state before the block, or Start's output.
        tensors: the inputs that need a gradient, as the model has them: the state first, if it is one of them.
        numbers: the number of each of ``tensors`` among the inputs of the pass; ``None`` for the state.
        entered: ``tensors`` without history, as the block gets them.
        given: the state that the block gets; ``None`` if it needs no gradient.
        entry: the Entry node of ``entered``; ``None`` if that is empty.
        versions: the version counters of ``entered`` before the block runs.
        only_state: whether the state is the only argument.
        handled: the exception that the program handles while it calls the block.
    """

    recording: DepthPass
    before: Tensor
    tensors: list[Tensor]
    numbers: Sequence[int | None]
    entered: Sequence[Tensor]
    given: Tensor | None
    entry: Node | None
    versions: list[int]
    only_state: bool
    handled: BaseException | None


class RecordedChain:
    """One chain of a model with an engine attached.

    Args:
        attachment: computes the gradients of each pass.
        site: the chain.

    Attributes:
        skips: whether a block that returns its input state unchanged is left out of the pass.
    """

    skips = True

    def __init__(self, attachment: Attachment, site: Site):
        self.attachment = attachment
        self.blocks, self.inside = site.blocks, site.inside
        self.splits, self.joined = site.splits, site.joined
        self.declared, self.requires_residual = site.declared, site.requires_residual
        self.mixing = Mixing()
        # Collected once: walking all modules in every pass would take longer than small blocks do.
        self._parameters = {
            path: [module._parameters for module in block.modules() if module._parameters]
            for path, block in self.blocks.items()
        }
        self._hooks = [h for m in self.inside.values() for h in (m._backward_hooks, m._backward_pre_hooks)]

    def record(self) -> list[Removable]:
        """Put hooks on the blocks that record their calls; return the handles that remove them."""
        handles: list[Removable] = []
        for block, path in {block: path for path, block in reversed(self.blocks.items())}.items():
            recorder = BlockRecorder(self, path, port_of(block))
            # Runs after the user's pre-hooks and before their forward hooks, so those are part of the model.
            handles.append(block.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            handles.append(block.register_forward_hook(recorder.leave, prepend=True, always_call=True))
        return handles

    def begin(self, state: Tensor, inputs: Sequence[Tensor]) -> DepthPass:
        """Return a new pass that starts from ``state``.

        Raises:
            ChainError: ``batched=True``, so the blocks should have run as a row.
        """
        if self.attachment.batched is True:
            raise ChainError(
                f"batched=True, but the blocks from {next(iter(self.blocks))} on are run one by one: called by the "
                "model, not by their nn.Sequential, or under autocast, a checkpoint, hooks for saved tensors, "
                "torch.compile or anomaly detection. Leave batched out: 'auto' batches blocks where this is possible "
                "and faster."
            )
        return DepthPass(self, self.trained(), inputs, self.trained_outside())

    def trained_outside(self) -> list[Tensor]:
        """Return the parameters of the model around the blocks that need a gradient."""
        return [p for p in self.attachment.outside_parameters() if p.requires_grad and not is_dtensor(p)]

    def trained(self) -> dict[str, list[Tensor]]:
        """Return the parameters of each block that need a gradient, by the block's path."""
        return {
            path: [p for named in modules for p in named.values() if p is not None and p.requires_grad]
            for path, modules in self._parameters.items()
        }

    def check(self, block: nn.Module) -> None:
        """Check for what may have been added since the engine was attached.

        Args:
            block: the first block of the pass.

        Raises:
            ChainError: sharded modules, full backward hooks, ``torch.func`` transforms or ``nn.DataParallel``.
        """
        first = next(iter(self.blocks))
        refuse_transforms(first)
        if "_is_replica" in vars(block):
            raise ChainError(
                f"{first} runs as one of several replicas of nn.DataParallel, which share the engine's recorder. Use "
                "DistributedDataParallel."
            )
        refuse(problems_of_shards(self.inside))
        if any(self._hooks):
            refuse(problems_of_backward_hooks(self.inside))

    def split(self, path: str, reason: str) -> None:
        """Store why the block at ``path`` is not the next link of its predecessor's pass."""
        self.splits[path] = reason


class BlockRecorder:
    """The two hooks of one block.

    Args:
        chain: the chain that the block belongs to.
        path: the block's module path.
        port: finds the state among the block's arguments and outputs.
    """

    def __init__(self, chain: RecordedChain, path: str, port: Port):
        self.chain, self.path, self.port = chain, path, port
        self._calls: dict[int, _Call] = {}  # By thread: several threads may run the model.

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the running calls: a copy has none."""
        return {**self.__dict__, "_calls": {}}

    # In one compiled region, blocks would share a graph. Unlike torch.compiler.disable, this imports no compiler.
    @uncompiled
    def enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook: detach the block's inputs, and join the pass of its state or begin a new one."""
        # A checkpoint around the block recomputes a call that is recorded already.
        if not torch.is_grad_enabled() or recomputed():
            return None
        if get_ident() in self._calls:
            raise CALLS_ITSELF.error(path=self.path)
        state, inputs, put = self.port.take(args, kwargs)
        needed = state is not None and state.requires_grad
        if not needed and not inputs and not any(p.requires_grad for p in block.parameters()):
            return None
        if state is None:
            self.chain.split(self.path, NO_TENSOR)
            return None
        others = [t for t in inputs if t is not state]
        recording, before = self._join(block, state, others)
        recording.before_block(self.path, block, state)
        tensors = [state, *others] if needed else others
        numbers = (*(None,) * needed, *map(recording.number, others))
        entered = recording.enter(self.path, numbers, tensors)
        given, entry = entered[0] if needed else None, entered[0].grad_fn if entered else None
        versions = [changes(t) for t in entered]
        only_state = len(args) + len(kwargs) == 1
        self._calls[get_ident()] = _Call(
            recording, before, tensors, numbers, entered, given, entry, versions, only_state, exc_info()[1]
        )
        new, rest = state if given is None else given, iter(entered[needed:])
        return put(new, [new if t is state else next(rest) for t in inputs])

    @uncompiled
    def leave(self, block: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Forward hook: record the block's graph; return the block's output with the recorded state in it."""
        call = self._calls.pop(get_ident(), None)
        # Without a result, because the block has raised.
        if call is None or (out is None and exc_info()[1] is not call.handled):
            return None
        state, rest = self.port.split(out)
        if state is None:
            raise ChainError(
                f"{self.path} returned {type(out).__name__}, in which the next state is not found: a block of a chain "
                "must return a tensor, or a tuple, list, dictionary or dataclass whose first entry is one. Say where "
                f"it is with gradfree.register_port({type(block).__name__}, ...), or leave the block out of the chain."
            )
        # Here, because a loss on the state before the block alone runs no backward pass of the chain.
        for each in call.entered:
            refuse_hooks(self.path, each)
        versions = [changes(t) for t in call.entered]
        if in_place := versions != call.versions:
            self._check_in_place(call, versions)
        if not state.requires_grad:
            return None
        root = state.grad_fn
        extra, same = [], {}
        # If the block returns an input unchanged, the model gets its original tensor back.
        if not in_place and (rest is not None or root is call.entry):
            same = dict(zip(map(id, call.entered), call.tensors, strict=True))
        if rest is not None:
            extra = [t for t in tensors_in(out) if t.requires_grad and t is not state and id(t) not in same]
        if self.chain.skips and id(state) in same and not extra:
            joined = self.port.join(same[id(state)], rest)
            return joined if rest is None else replaced(joined, same)
        link = Link(
            path=self.path,
            block=block,
            out=state,
            entry=call.entry,
            numbers=call.numbers,
            known=call.recording.known,
            root=root,
            given=call.given,
            version=changes(state),
            extra=extra,
            in_place=in_place,
            only_state=call.only_state,
        )
        after, *outputs = call.recording.leave(link, call.before)
        joined = self.port.join(after, rest)
        if rest is None:
            return joined
        # The rest of the output may contain the state again.
        return replaced(joined, {**same, id(state): after, **dict(zip(map(id, extra), outputs, strict=True))})

    def _join(self, block: nn.Module, state: Tensor, others: Sequence[Tensor]) -> tuple[DepthPass, Tensor]:
        """Return the pass that ``state`` belongs to, or a new one, and what its next Exit node follows."""
        node: Any = state.grad_fn
        if type(node) is EXIT and node.recording.chain_ref() is self.chain:
            recording: DepthPass = node.recording
            reason = self._why_split(recording, node, state, others)
            if reason is None:
                return recording, state
            self.chain.split(self.path, reason)
        else:
            self.chain.check(block)
            if (state.requires_grad or others) and self.path != next(iter(self.chain.blocks)):
                self.chain.split(self.path, COMPUTED if state.requires_grad else CONSTANT)
        recording = self.chain.begin(state, others)
        return recording, recording.begin(state)

    def _why_split(self, recording: DepthPass, node: Any, state: Tensor, others: Sequence[Tensor]) -> str | None:
        """Return why the block cannot be the next link of ``recording``; ``None`` if it can."""
        if node.extra:
            return NOT_THE_STATE
        if node.index != len(recording.links) - 1:
            return BRANCHING
        if has_hooks(state):
            return HOOKED
        for tensor in others:
            if recording.number(tensor) is None:
                return (
                    f"it gets a tensor of shape {tuple(tensor.shape)} that needs a gradient and that the first block "
                    "of the chain did not get"
                )
        return None

    def _check_in_place(self, call: _Call, versions: Sequence[int]) -> None:
        """Raise unless what the block has changed in place is its state alone, and not the first of the pass."""
        changed = [t for t, now, before in zip(call.entered, versions, call.versions, strict=True) if now != before]
        # The first state comes from outside the pass, where the recorder does not see its other uses.
        if not call.recording.links or len(changed) > 1 or changed[0] is not call.given:
            raise ChainError(
                f"{self.path} modifies its input in place: other uses of that state would get a wrong gradient. Use "
                "the out-of-place operation (nn.ReLU(inplace=False), x = x + y), or the engine 'backprop'."
            )


# Why a block starts a new pass.
COMPUTED = "its input is computed by the model, a hook or a reentrant checkpoint, and is not the output of a block"
NOT_THE_STATE = "its first argument is an extra output of a block, no state; name the state with gradfree.register_port"
CONSTANT = (
    "its first argument needs no gradient, and another one does; if that is the state, name it with "
    "gradfree.register_port"
)
NO_TENSOR = "its first argument is no tensor; name the argument that is the state with gradfree.register_port"
BRANCHING = "another block has used the output of the block before it: the blocks branch"
HOOKED = "the state before it has a gradient hook or retain_grad(), which needs the state's whole gradient"
