"""Recording a forward pass through layers that an engine takes apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradfree.depth.depth_chain import Trained
from gradfree.depth.depth_pass import DepthPass
from gradfree.depth.link import Link
from gradfree.depth.nodes import Anchor
from gradfree.depth.recorder import BlockRecorder, RecordedChain
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import TAIL, LayerChain, released, valueless
from gradfree.layers.roles import Role, keeps_state, role_of
from gradfree.torchside.random_state import RandomState


class RecordedLayers(RecordedChain):
    """A chain of layers of a model with an engine attached: all of them go on in one pass."""

    skips = False

    def begin(self, state: Tensor, inputs: Sequence[Tensor]) -> LayeredPass:
        """Return a new pass that starts from ``state``."""
        return LayeredPass(self, Trained.collect(self.own()), state, inputs)

    def own(self) -> Iterator[Tensor]:
        """Yield the layers' own trainable parameters."""
        for parameters in self._parameters:
            yield from (p for p in parameters.values() if p is not None and p.requires_grad)

    def split(self, path: str, reason: str) -> None:
        """Refuse it: an engine that takes layers apart takes the error at the end of the whole chain."""
        raise ChainError(
            f"{path} does not go on the chain: {reason}. Leave the layers from there on out of it, chains=[...]."
        )


class LayeredPass(DepthPass):
    """A pass through a chain of layers; for an engine that streams, its activations are not stored.

    Args:
        chain: what is recorded.
        trained: the parameters that may be trained in it.
        state: what enters the chain.
        inputs: the other tensors that need a gradient.
    """

    chain: RecordedLayers

    def __init__(self, chain: RecordedLayers, trained: Trained, state: Tensor, inputs: Sequence[Tensor]):
        super().__init__(chain, trained, inputs)
        # A layer's entry leads to the parameters of the layers before it: were its own among them, autograd would
        # compute the gradient of the layer's input for that of its weights.
        self.anchor = Trained.collect(()).anchor
        self.initial, self.goes_on = state.detach(), state.requires_grad
        self._entered = [(tensor, tensor._version) for tensor in (self.initial, *self.parameters)]
        # What a parameter's ``data`` is set to between the passes is not what the pass has run with.
        self._held = [p.detach() for p in self.parameters]
        self._random: dict[str, RandomState] = {}
        self._streamed = 0
        engine = chain.attachment.engine
        self._streams, self._keeps = engine.streams, engine.reads_states
        self.roles: list[Role] = []
        self._paths: set[str] = set()
        self.first = next(iter(chain.blocks))
        kind = state.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def before_block(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Remember the random state that a dropout mask is drawn from, to draw it again.

        Raises:
            ChainError: what is about to happen is not the layer's own function of the state before it.
        """
        role = _plain_role(path, block)
        if path in self._paths:
            raise ChainError(
                f"{path} runs twice in one forward pass. To apply a layer several times, give each use a separate "
                "module (they may share parameters)."
            )
        if not state.is_floating_point():
            raise ChainError(
                f"{path} was given {state.dtype}, but an error can only enter a chain of real numbers. Convert the "
                "input with x.float(), or begin the chain behind what embeds it."
            )
        if self.links and self.links[-1].has_changed:
            raise ChainError(
                f"the output of {self.links[-1].path} was changed in place before {path} was given it. Compute a new "
                "tensor in a separate layer, or leave the layers from there on out of the chain."
            )
        if self._streams and role is Role.DROPOUT and block.training:
            self._random[path] = RandomState.of(self.initial.device)

    def leave(self, link: Link, before: Tensor) -> Sequence[Tensor]:
        """Record ``link``, and let go of what is not needed any more.

        For an engine that streams, of all before the last layer with weights; for others, unless they read states, of
        values inside a layer's own activation. Autograd keeps those that derivatives need.

        Raises:
            ChainError: a layer without weights, by its role, has used parameters, which would get no gradient.
        """
        role = _plain_role(link.path, link.block)
        if role is not Role.WEIGHTS and link.parameters:
            raise ChainError(
                f"{link.path} is a {type(link.block).__name__}, registered as without weights, but trains parameters, "
                "which would get no gradient. Freeze them, requires_grad_(False), or leave it out of the chain."
            )
        left = super().leave(link, before)
        if link.parameters:
            self.anchor = Anchor.apply(self.anchor, *[self.parameters[n] for n in link.parameters])
        self.roles.append(role)
        self._paths.add(link.path)
        index = len(self.links) - 1
        if self._streams and role is Role.WEIGHTS:
            for i in range(self._streamed, index):
                self._drop_values(i, released(self.links[i]))
            self._streamed = index
        elif not self._keeps and role in TAIL and index and not keeps_state(self.links[index - 1].block):
            self._drop_values(index - 1, valueless(self.links[index - 1]))
        return left

    def _drop_values(self, index: int, link: Link) -> None:
        """Replace link ``index`` by ``link``, which has no values, and let go of what the next layer was given."""
        self.links[index], self.links[index + 1].given = link, None

    def linearise(self, links: list[Link], keep_graph: bool) -> LayerChain:
        """Return the chain as engines see it."""
        return LayerChain(self, links, keep_graph)

    def check_unchanged(self) -> None:
        """Refuse to go on with other parameters, or other values of these or of the input, than the pass had."""
        known = zip_longest(Trained.collect(self.chain.own()).parameters, self.parameters, self._held)
        # One that has got another dtype has left autograd's graph.
        if any(p is not trained or p.dtype is not held.dtype for p, trained, held in known):
            raise ChainError(
                f"the layers from {self.first} on have other trainable parameters in the backward pass than in "
                "the forward pass (torch.func.functional_call gives them back before), but this engine reads their "
                "weights in both. Load the parameters into the model, or use an engine for any blocks."
            )
        moved = any(p.data_ptr() != held.data_ptr() for p, held in zip(self.parameters, self._held, strict=True))
        if moved or any(tensor._version != version for tensor, version in self._entered):
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
        return link.with_fields(out=out, state=get_gradient_edge(local), end=None)


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
