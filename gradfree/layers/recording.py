"""Recording a forward pass through layers that an engine takes apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from gradfree.chains.memory import Memory
from gradfree.depth.batched_chain import Ran
from gradfree.depth.borders import Anchor, Outputs
from gradfree.depth.chain import Trained
from gradfree.depth.jacobians import Mixing
from gradfree.depth.link import Link
from gradfree.depth.recorder import BlockRecorder, RecordedChain
from gradfree.depth.recording import Recording
from gradfree.errors import ChainError
from gradfree.layers.chain import TAIL, LayerChain, released, valueless
from gradfree.layers.roles import Role, keeps_state, role_of
from gradfree.torchside.random_state import RandomState


class RecordedLayers(RecordedChain):
    """A chain of layers of a model with an engine attached: nothing in it is passed over."""

    skips = False
    by_hooks = True

    def begin(self, state: Tensor, inputs: Sequence[Tensor]) -> Recording:
        """Return the recording of a pass that starts from ``state``."""
        return LayerRecording(self, state, self.trainable(), inputs)

    def split(self, path: str, reason: str, remedy: str) -> None:
        """Refuse it: an engine that takes layers apart takes the error at the end of the whole chain."""
        raise ChainError(f"{path} does not go on the chain: {remedy}")


class LayerRecording(Recording):
    """A pass through a chain of layers; for an engine that streams, its activations are not stored."""

    def __init__(self, chain: RecordedChain, state: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]):
        super().__init__(chain, Trained.of(parameters), inputs)
        self.initial, self.goes_on = state.detach(), state.requires_grad
        self._versions = [(tensor, tensor._version) for tensor in (self.initial, *parameters)]
        # What a parameter's ``data`` is set to between the passes is not what the pass has run with.
        self._held = [p.detach() for p in parameters]
        self._random: dict[str, RandomState] = {}
        self._streamed = 0
        engine = chain.attachment.engine
        self._streams, self._keeps = engine.streams, engine.reads_states
        self.roles: list[Role] = []
        self._paths: set[str] = set()
        self._origins = [state]
        # One leaf there must be: of what needs no gradient, autograd would keep every state.
        self._lead = Anchor.apply(torch.empty(0, requires_grad=True), *self._before())
        self._led = 0
        self.first = next(iter(chain.blocks))
        kind = state.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    @property
    def memory(self) -> Memory:
        """What the chain keeps from pass to pass."""
        return self.chain.attachment.memory

    @property
    def mixing(self) -> Mixing:
        """What earlier passes have told of the layers."""
        return self.chain.mixing

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Remember the random state that a dropout mask is drawn from, to draw it again.

        Raises:
            ChainError: what is about to happen is not the layer's own function of the state before it.
        """
        self._role = _plain_role(path, block)
        if path in self._paths:
            raise ChainError(
                f"{path} runs twice in one forward pass. To apply a layer several times, give each use a module of its "
                "own (they may share parameters)."
            )
        if not state.is_floating_point():
            raise ChainError(
                f"{path} was given {state.dtype}, but an error can only enter a chain of real numbers. Convert the "
                "input with x.float(), or begin the chain behind what embeds it."
            )
        if self.links and state._version != self.handed[-1].version:
            raise ChainError(
                f"the output of {self.links[-1].path} was changed in place before {path} was given it. Compute a new "
                "tensor in a layer of its own, or leave the layers from there on out of the chain."
            )
        if self._streams and self._role is Role.DROPOUT and block.training:
            self._random[path] = RandomState.of(self.initial.device)
        if _hands_out(block):
            # To what is before it alone: else autograd, asked for the gradients of a layer's own parameters, would
            # compute that of its input, too.
            before = (self.parameters[n] for link in self.links[self._led :] for n in link.parameters)
            self._lead, self._led = Anchor.apply(self._lead, *before), len(self.links)
            # What is there for layers to come leads to less.
            self._entries = Outputs()

    def add(self, link: Link) -> None:
        """Keep ``link``.

        Raises:
            ChainError: a layer without weights, by its role, has used parameters, which would get no gradient.
        """
        if self._role is not Role.WEIGHTS and link.parameters:
            raise ChainError(
                f"{link.path} is a {type(link.block).__name__}, registered as without weights, but trains parameters, "
                "which would get no gradient. Freeze them, requires_grad_(False), or leave it out of the chain."
            )
        super().add(link)
        self.roles.append(self._role)
        self._paths.add(link.path)

    def leave(self, link: Link | Ran, given: Tensor | None, before: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Keep ``link``, and let go of what is not needed any more.

        For an engine that streams, of all before the last layer with weights; for others, unless they read states, of
        values inside a layer's own activation. Autograd keeps those that derivatives need.
        """
        left = super().leave(link, given, before)
        index = len(self.links) - 1
        if self._streams and self._role is Role.WEIGHTS:
            for i in range(self._streamed, index):
                self._let_go(i, released(self.links[i]))
            self._streamed = index
        elif not self._keeps and self._role in TAIL and index and not keeps_state(self.links[index - 1].block):
            self._let_go(index - 1, valueless(self.links[index - 1]))
        return left

    @cached_property
    def _anchor(self) -> Tensor:
        return Anchor.apply(self._lead, *self.parameters)

    def _leads(self) -> Tensor:
        """Return what leads to leaf tensors before the chain, and to parameters as far as a layer's inside needs them.

        One that led to all parameters would be walked through, whole, for the gradients of each layer.
        """
        return self._lead

    def _let_go(self, index: int, link: Link) -> None:
        handed = self.handed[index]
        self.handed[index] = handed._replace(seen=_count_of(handed.seen), apart=list(map(_count_of, handed.apart)))
        self.links[index], self.given[index + 1] = link, None

    def linearise(self, links: list[Link], keep_graph: bool) -> LayerChain:
        """Return the chain as engines see it."""
        return LayerChain(self, links, keep_graph)

    def check_parameters(self) -> None:
        """Refuse to go on with layers that have got other parameters since the pass."""
        known = zip_longest(self.chain.trainable(), self.parameters, self._held)
        # One that has got another dtype has left autograd's graph.
        if any(p is not trained or p.dtype is not held.dtype for p, trained, held in known):
            raise ChainError(
                f"the layers from {self.first} on have other trainable parameters in the backward pass than in "
                "the forward pass (torch.func.functional_call gives them back before), but this engine reads their "
                "weights in both. Load the parameters into the model, or use an engine for any blocks."
            )

    def check_versions(self) -> None:
        """Refuse to go on with weights or an input that are no longer those of the pass."""
        self.check_parameters()
        moved = any(p.data_ptr() != held.data_ptr() for p, held in zip(self.parameters, self._held, strict=True))
        if moved or any(tensor._version != version for tensor, version in self._versions):
            raise ChainError(
                f"a weight of the chain from {self.first}, or its input, was changed in place between the "
                "forward and the backward pass, or its data replaced. Step the optimizer after the backward pass, or "
                "copy the input."
            )

    def run_again(self, link: Link, x: Tensor) -> Link:
        """Return ``link`` with a graph of its own, for the input ``x``; as in the pass if ``x`` is.

        Raises:
            ChainError: dropout that was switched on or off since.
        """
        state = self._random.get(link.path)
        if role_of(link.block) is Role.DROPOUT and link.block.training is (state is None):
            raise ChainError(
                f"{link.path} was switched between training and evaluation before the backward pass, which runs it "
                "again. Switch after the backward pass, or use streaming=False."
            )
        with torch.enable_grad(), nullcontext() if state is None else state.restored(), torch.autocast(*self._autocast):
            local = x.detach().requires_grad_(x.is_floating_point())
            out = link.block.forward(local)
        return link.changed(out=out, state=get_gradient_edge(local), end=None)


def _count_of(tensor: Tensor) -> Tensor:
    """Return a tensor that has the count of changes in place of ``tensor``, but not its values."""
    count = tensor.detach()
    count.data = tensor.new_empty(0)
    return count


def _plain_role(path: str, layer: nn.Module) -> Role:
    """Refuse a layer whose calls are no longer its class's own forward, from the recorder's hook to its other one."""
    role = role_of(layer)
    if role is None:
        raise ChainError(f"{path} computes something else than when the engine was attached. Change it, then attach.")
    *_, innermost = layer._forward_pre_hooks.values()
    for hook in (innermost, next(iter(layer._forward_hooks.values()))):
        if not isinstance(getattr(hook, "__self__", None), BlockRecorder):
            raise ChainError(
                f"{path} has got a forward hook or pre-hook since the engine was attached, that runs between the "
                "layer and the engine and may change what the layer is given or returns. Register it first, then "
                "attach."
            )
    return role


def _hands_out(layer: nn.Module) -> bool:
    """Tell whether a loss might use a tensor from inside a layer that is about to run; hooks may be new in each pass.

    The first forward hook on a layer is the recorder's; others are given the layer's input as it is inside.
    """
    if _global_forward_hooks or _global_forward_pre_hooks or len(layer._forward_hooks) > 1:
        return True
    _, *inner = modules = list(layer.modules())
    return not all(map(_is_torchs, modules)) or any(m._forward_hooks or m._forward_pre_hooks for m in inner)


def _is_torchs(module: nn.Module) -> bool:
    """Tell whether all that ``module`` computes is torch's own code, which keeps nothing."""
    classes = type(module).__mro__[:-1]
    return "forward" not in vars(module) and all(kind.__module__.startswith("torch.nn.") for kind in classes)
