"""Recording blocks in place of their forward, and running them without a graph: one by one, or a whole container.

A state that no code of the user's is given needs no node of autograd's, and a block without hooks of the user's none of
ours: what these cost is as much as small blocks take to run.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from gradfree.batched.plan import Setting
from gradfree.depth import link as why
from gradfree.depth.batched_chain import Ran
from gradfree.depth.batching import Batching
from gradfree.depth.borders import BORDERS, EXITS
from gradfree.depth.chain import Trained
from gradfree.depth.link import has_hooks
from gradfree.depth.recording import Attached, Recording
from gradfree.errors import ChainError
from gradfree.torchside.private import is_compiled_around, recomputed


class Recorder(Protocol):
    """What records the calls of a module."""

    call: Any
    """What is known of the one that is running, or its pass; what ``enter`` leaves tells whether it has no graph."""

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return what the module is given instead, if anything."""

    def leave(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Return what its caller gets instead of ``out``, if anything."""


class CallsByThread:
    """What is going on in calls of a module: several threads may run the model."""

    def __init__(self) -> None:
        self._calls: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a call that an exception has cut short: its tensors cannot be copied."""
        return {**self.__dict__, "_calls": {}}

    @property
    def call(self) -> Any:
        """What is known of the call that is running in this thread, if it is recorded."""
        return self._calls.get(get_ident())

    @call.setter
    def call(self, call: Any) -> None:
        if call is None:
            self._calls.pop(get_ident(), None)
        else:
            self._calls[get_ident()] = call


class LinkRecorder(Recorder, Protocol):
    """What records the calls of a block of a chain."""

    @property
    def chain(self) -> Attached:
        """The chain."""


class AttachedChain(Attached, Protocol):
    """A chain with an engine attached."""

    def check(self) -> None:
        """Refuse what may have come since the engine was attached."""


class InPlaceOfForward:
    """What is put in place of a module's ``forward``.

    Args:
        module: is called.
        path: of the module.

    Attributes:
        own: the module's own forward.
        removed: whether it is no longer on the module; somebody who has wrapped it may call it yet.
    """

    KEYS = frozenset({"forward", "_replicate_for_data_parallel"})
    """What is put on the module."""

    def __init__(self, module: nn.Module, path: str):
        self.own, self.removed = module.forward, False
        self._module, self._path = module, path
        vars(module).update({key: getattr(self, key) for key in self.KEYS})

    def remove(self) -> None:
        """Give the module its own forward back, unless somebody has put another one in its place."""
        self.removed, held = True, vars(self._module)
        for key in self.KEYS:
            if held.get(key) == getattr(self, key):
                del held[key]

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise ChainError(why.REPLICA.format(path=self._path))


class RecordedForward(InPlaceOfForward):
    """Records the calls of a module in place of its ``forward``, inside of all hooks that it has.

    The recorder's ``enter`` and ``leave`` are called as a forward pre-hook and a forward hook would be, in less time.

    Args:
        recorder: of the calls; says which are to run without a graph.
        module: is called.
        path: of the module.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, path: str):
        super().__init__(module, path)
        self.recorder = recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        # A module may call itself: that is part of the call that is running.
        if self.removed or not torch.is_grad_enabled() or self.recorder.call is not None:
            return self.own(*args, **kwargs)
        try:
            given = self.recorder.enter(self._module, args, kwargs)
            if given is not None:
                args, kwargs = given
            call = self.recorder.call
            out = self._run(args, kwargs) if call is not None and call.without_graph else self.own(*args, **kwargs)
        except BaseException:
            self.recorder.call = None
            raise
        handed = self.recorder.leave(self._module, args, out)
        return out if handed is None else handed

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Quicker than torch.no_grad(), which this is.
        try:
            torch._C._set_grad_enabled(False)
            return self.own(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)


class RecordedBlock(RecordedForward):
    """The same for a block: where it goes on in a batched pass, nothing is done that such a step does not need.

    What that costs is as much as a small block takes to run; all others go the way of their recorder.

    Args:
        recorder: of the block.
        block: is called.
        path: of the block.
    """

    recorder: LinkRecorder

    def __init__(self, recorder: LinkRecorder, block: nn.Module, path: str):
        super().__init__(recorder, block, path)
        self._hooks = block._forward_pre_hooks, block._forward_hooks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        recording = self._gone_on_with(args, kwargs)
        if recording is None:
            return super().forward(*args, **kwargs)
        state = args[0]
        try:
            self.recorder.call = recording
            torch._C._set_grad_enabled(False)
            out = _step(self._path, self.own, state)
        finally:
            torch._C._set_grad_enabled(True)
            self.recorder.call = None
        # It shares its count of changes in place with the state that the block was given. Not that itself, which leads
        # to a node that keeps the recording.
        x = recording.handed[-1].seen
        return recording.go_on(Ran(self._path, self._module, out, x), x, state)

    def _gone_on_with(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording | None:
        """Return the pass whose last state is all that the block is given, if it runs without a graph there."""
        if is_compiled_around() or len(args) != 1 or kwargs or type(args[0]) is not Tensor:
            return None
        state, recorder, node = args[0], self.recorder, args[0].grad_fn
        if not isinstance(node, EXITS) or self.removed or recorder.call is not None or not torch.is_grad_enabled():
            return None
        recording: Recording = node.recording
        follows = (
            recording.of() is recorder.chain
            and node.index + state.output_nr == len(recording.links)
            and recording.columns is None
            and recording.setting is not None
            and recording.setting.is_batched(self._path)
        )
        return None if not follows or any(self._hooks) or has_hooks(state) else recording


def recorder_of(module: nn.Module) -> Any:
    """Return what records the calls of ``module`` in place of its ``forward``; ``None`` if nothing does."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner.recorder if isinstance(owner, RecordedForward) and not owner.removed else None


class WholeRow(InPlaceOfForward):
    """Runs a container whose blocks are all batched, in place of its ``forward``; else that runs.

    Args:
        recorded: the chain, of all the container's blocks.
        container: holds them.
        path: of the container.
    """

    def __init__(self, recorded: AttachedChain, container: nn.Sequential, path: str):
        super().__init__(container, path)
        self._recorded, self._container = recorded, container
        self._blocks = list(recorded.blocks.values())
        kinds = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
        self._hooks = [getattr(block, kind) for block in self._blocks for kind in kinds]
        self._wrapped = [vars(block)["forward"] for block in self._blocks]
        forwards = [wrapped.__self__.own for wrapped in self._wrapped]
        self._rows = list(zip(recorded.blocks, self._blocks, forwards, strict=True))

    @classmethod
    def fits(cls, container: nn.Sequential, recorded: AttachedChain) -> bool:
        """Tell whether ``container`` does nothing but to call the blocks, as ``nn.Sequential`` does."""
        kind, blocks = type(container), list(recorded.blocks.values())
        return (
            recorded.batching is not None
            and kind.forward is nn.Sequential.forward
            and kind.__iter__ is nn.Sequential.__iter__
            and "forward" not in vars(container)
            and list(container._modules.values()) == blocks
            and all(recorder_of(b) is not None for b in blocks)
            and all(type(b).__call__ is nn.Module.__call__ for b in blocks)
        )

    def forward(self, input: Tensor) -> Any:
        """Run the blocks."""
        batching = self._recorded.batching
        if self.removed or batching is None or not batching.is_whole or not self._can_run(input):
            return self.own(input)
        setting = batching.begin(input, next(iter(self._recorded.blocks)))
        if setting is None or not setting.plan.whole:
            return self.own(input)
        self._recorded.check()
        return self._run(input, setting, batching)

    def _can_run(self, state: Tensor) -> bool:
        """Tell whether nobody would notice that the blocks run without hooks."""
        return (
            not torch.compiler.is_dynamo_compiling()
            and torch.is_grad_enabled()
            and not recomputed()
            and type(state) is Tensor
            and not isinstance(state.grad_fn, BORDERS)
            and self._is_bare()
        )

    def _is_bare(self) -> bool:
        """Tell whether the container has the blocks that it had, and these no hooks."""
        return (
            list(self._container._modules.values()) == self._blocks
            and [vars(block).get("forward") for block in self._blocks] == self._wrapped
            and not any(self._hooks)
            and not any(block._compiled_call_impl for block in self._blocks)
            and not _has_any_global_hook()
        )

    def _run(self, state: Tensor, setting: Setting, batching: Batching) -> Tensor:
        recording = Recording(self._recorded, Trained(batching.stack(setting).stacks, {}), ())
        before = recording.begin_as(state, setting)
        *inner, last = zip(self._rows, batching.parts(setting), strict=True)
        given, x = state, state.detach()
        torch._C._set_grad_enabled(False)
        try:
            for (path, block, forward), part in inner:
                # As states do; what a block does with one that needs no gradient may be something else.
                handed = _step(path, forward, given).requires_grad_()
                recording.pass_by(Ran(path, block, handed, x, *part), given, handed)
                given = x = handed
            (path, block, forward), part = last
            link = Ran(path, block, _step(path, forward, given), x, *part)
        finally:
            torch._C._set_grad_enabled(True)
        hooked = next((i for i, handed in enumerate(recording.handed, 1) if handed.seen._backward_hooks), None)
        if hooked is not None:
            raise ChainError(why.HOOKED_INSIDE.format(path=[*self._recorded.blocks][hooked]))
        return recording.leave(link, given, before)[0]


def _step(path: str, forward: Callable[[Tensor], Any], given: Tensor) -> Tensor:
    version, out = given._version, forward(given)
    if not isinstance(out, Tensor) or given._version != version:
        raise ChainError(why.CHANGED.format(path=path))
    return out.detach()
