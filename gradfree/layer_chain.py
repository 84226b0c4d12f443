"""Chains of layers that can be taken apart, for engines that do not pull the error back through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gradfree.chain import ChainError, ChainGradients
from gradfree.containers import Container
from gradfree.depth_chain import DepthChain, Link
from gradfree.layers import Convolution, Role, adjoint, known_layers, linear_part, role_of
from gradfree.random_state import RandomState
from gradfree.recording import BlockRecorder, RecordedChain, Recording
from gradfree.scan import Cotangent

if TYPE_CHECKING:
    from gradfree.engine import Engine

TAIL = (Role.POINTWISE, Role.DROPOUT)
"""What may follow a layer with weights and still be its own activation."""


class Layered(Container):
    """The layers of an ``nn.Sequential`` or ``nn.ModuleList``, those of nested ones included."""

    looks_like = "an nn.Sequential of layers that can be taken apart, two of them or more with weights"

    def __init__(self, path: str, module: nn.Module):
        super().__init__(path, module)
        self.blocks = dict(_leaves(path, module))

    @staticmethod
    def is_evident(module: nn.Module) -> bool:
        """Tell whether it is a Sequential of known layers alone, two or more of them with weights."""
        roles = [role_of(leaf) for _, leaf in _leaves("", module)]
        return isinstance(module, nn.Sequential) and None not in roles and roles.count(Role.WEIGHTS) > 1

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the layers."""
        yield from super().problems()
        for path, layer in self.blocks.items():
            if role_of(layer) is None:
                yield (
                    f"{path} is a {type(layer).__name__}, which this engine cannot take apart into linear maps and "
                    f"functions of single elements. It knows, in their plain forms: {known_layers()}."
                )

    def record(self, engine: Engine, memory: dict[str, Tensor], lean: bool) -> list[RemovableHandle]:
        """Put the recording hooks on the layers."""
        return _RecordedLayers(engine, self, memory).record()

    def __str__(self) -> str:
        weighted = sum(role_of(layer) is Role.WEIGHTS for layer in self.blocks.values())
        return f"{len(self.blocks)} layers, {weighted} of them with weights"


def _leaves(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _leaves(where, child)
        elif child is not None:
            yield where, child


class Compared(NamedTuple):
    """What two passes have left of one layer with weights.

    Attributes:
        link: the layer, as in :meth:`LayerChain.replay`.
        x: what entered it in the first pass.
        shift: how much less entered it in the second pass.
        difference: how much less left its activation, the pointwise functions and dropout that follow it; ``None``
            for the chain's last layer with weights.
    """

    link: Link
    x: Tensor
    shift: Tensor
    difference: Tensor | None


class LayerChain(DepthChain):
    """Links that are single layers, run in order.

    Args:
        recording: the pass.
        links: those that the loss has reached; ``out`` is on the meta device where nothing was stored.
        keep_graph: as in :class:`DepthChain`.
    """

    links: Sequence[Link]

    def __init__(self, recording: LayerRecording, links: Sequence[Link], keep_graph: bool):
        super().__init__(links, recording.parameters, len(recording.inputs), keep_graph, recording.chain.memory)
        self.recording = recording
        weighted = [i for i, link in enumerate(links) if role_of(link.block) is Role.WEIGHTS]
        if not weighted:
            raise ChainError(f"none of {links[0].path} to {links[-1].path} has weights: there is nothing to train.")
        self.last = weighted[-1]
        """Index of the last link with weights."""

    def error(self, direct: Sequence[Cotangent]) -> Tensor:
        """Return the cotangent at the output of the last link with weights, exact.

        Raises:
            ChainError: the loss uses another state, too; states are not (samples, ...) throughout; or the layers have
                other weights now than in the pass.
        """
        self.recording.check_parameters()
        for link in self.links:
            _check_samples(link, self.recording.initial)
        for link, e in zip(self.links[:-1], direct[:-1], strict=True):
            if e is not None:
                raise ChainError(
                    f"the loss uses the output of {link.path}, which lies inside the chain: this engine takes the "
                    "error at the chain's end alone. Leave the layers from there on out of the chain, or use another "
                    "engine."
                )
        cotangent = direct[-1]
        assert cotangent is not None  # A recording cuts its links behind the last state that has one.
        for link in reversed(self.links[self.last + 1 :]):
            cotangent = self.pulled(link, cotangent)
        return cotangent

    def backpropagate(self, direct: Sequence[Cotangent]) -> ChainGradients:
        """Return the exact gradients; what was not stored is run again, and stored."""
        self.links = [link for link, _ in self.replay()]
        return super().backpropagate(direct)

    def zero(self) -> ChainGradients:
        """Return gradients to add to."""
        return self._zero()

    def shape(self, index: int) -> torch.Size:
        """Return the shape of what enters link ``index``."""
        return self.recording.initial.shape if index == 0 else self.links[index - 1].out.shape

    def replay(self) -> Iterator[tuple[Link, Tensor]]:
        """Yield every link with what entered it, in the order of the pass; what was not stored is run again.

        Raises:
            ChainError: weights or input were changed in place since.
        """
        self.recording.check_versions()
        x = self.recording.initial
        for link in self.links:
            live = self.recording.run_again(link, x) if link.out.is_meta else link
            yield live, x
            x = live.out.detach()

    def transposed(self, error: Tensor, weights: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return ``error``, at the output of link :attr:`last`, times the linear parts of it and all links before.

        Args:
            error: (N, ...); N is free.
            weights: to use instead of the layers' own, by path.

        Returns:
            (N, ...), shaped like the chain's input.
        """
        for i in range(self.last, -1, -1):
            link = self.links[i]
            if role_of(link.block) in (Role.WEIGHTS, Role.LINEAR, Role.MAX):
                error = adjoint(link.block, error, self.shape(i), weights.get(link.path) if weights else None)
        return error

    def pulled(self, link: Link, cotangent: Tensor) -> Tensor:
        """Return ``cotangent`` times the exact Jacobian of ``link``."""
        assert link.state is not None
        return torch.autograd.grad(link.out, link.state, cotangent.to(link.out.dtype), retain_graph=True)[0]

    def compared(self, shift: Tensor, tangent: bool = False) -> Iterator[Compared]:
        """Run a second pass that starts from less by ``shift``; yield every layer with weights, in order.

        Args:
            shift: shaped like the chain's input, of at least single precision.
            tangent: as in :meth:`pushed`.

        Raises:
            ChainError: as in :meth:`replay`.
        """
        waiting = None
        for i, (link, x) in enumerate(self.replay()):
            role = role_of(link.block)
            if waiting is not None and role not in TAIL:
                yield waiting._replace(difference=shift)
                waiting = None
            here = Compared(link, x, shift, None)
            if i == self.last:
                yield here
                return
            shift = self.pushed(link, x, shift, tangent)
            if role is Role.WEIGHTS:
                waiting = here

    def pushed(self, link: Link, x: Tensor, shift: Tensor, tangent: bool) -> Tensor:
        """Return how much less ``link`` gives for ``x`` - ``shift`` than for ``x``, with the same dropout mask.

        Args:
            link: of :meth:`replay`.
            x: what entered it.
            shift: shaped like ``x``, of at least single precision.
            tangent: whether to return the Jacobian's product with ``shift`` instead of a difference.
        """
        role = role_of(link.block)
        if role is Role.DROPOUT or (role is Role.POINTWISE and tangent):
            # Both Jacobians are diagonal, so their own transposes; a dropout's has the mask.
            return self.pulled(link, shift).to(shift.dtype)
        if role not in (Role.POINTWISE, Role.MAX):
            return linear_part(link.block, shift)
        stored = link.out.detach() if x.dtype == shift.dtype else None
        x = x.to(shift.dtype)
        if tangent:
            return torch.func.jvp(link.block.forward, (x,), (shift,))[1]
        return (link.block.forward(x) if stored is None else stored) - link.block.forward(x - shift)

    def add(self, link: Link, cotangent: Tensor, total: ChainGradients, at: Tensor | None = None) -> None:
        """Add the gradients of the link's parameters to ``total``, given the cotangent at its output.

        Args:
            link: of :meth:`replay`.
            cotangent: shaped like its output.
            total: is changed.
            at: another input than that of the pass to take them at.
        """
        if at is not None:
            link = self.recording.run_again(link, at)
        self._add_local([replace(link, state=None)], [cotangent.to(link.out.dtype)], total)


class _RecordedLayers(RecordedChain):
    def begin(self, state: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]) -> Recording:
        return LayerRecording(self, state, parameters, inputs)


class LayerRecording(Recording):
    """A pass through a chain of layers; for an engine that streams, its activations are not stored."""

    def __init__(self, chain: RecordedChain, state: Tensor, parameters: Sequence[Tensor], inputs: Sequence[Tensor]):
        super().__init__(chain, parameters, inputs)
        self.initial = state.detach()
        self._versions = [(tensor, tensor._version) for tensor in (self.initial, *parameters)]
        self._random: dict[str, RandomState] = {}
        self._version = 0
        kind = state.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def before(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Remember the random state that a dropout mask is drawn from, to draw it again.

        Raises:
            ChainError: what is about to happen is not the layer's own function of the state before it.
        """
        _check_plain(path, block)
        if not state.is_floating_point():
            raise ChainError(
                f"{path} was given {state.dtype}, but an error can only enter a chain of real numbers. Convert the "
                "input with x.float(), or begin the chain behind what embeds it."
            )
        if self.links and state._version != self._version:
            raise ChainError(
                f"the output of {self.links[-1].path} was changed in place before {path} was given it. Compute a new "
                "tensor in a layer of its own, or leave the layers from there on out of the chain."
            )
        if self.chain.engine.streams and role_of(block) is Role.DROPOUT and block.training:
            self._random[path] = RandomState.of(self.initial.device)

    def add(self, link: Link) -> None:
        """Keep ``link``; for an engine that streams, let go of the graphs before the last layer with weights."""
        if self.chain.engine.streams and role_of(link.block) is Role.WEIGHTS:
            self.links = [_released(link) for link in self.links]
        super().add(link)
        self._version = link.out._version

    def linearise(self, links: Sequence[Link], keep_graph: bool) -> LayerChain:
        """Return the chain as engines see it."""
        return LayerChain(self, links, keep_graph)

    def check_parameters(self) -> None:
        """Refuse to go on with layers that have got other parameters since the pass."""
        if any(p is not known for p, known in zip_longest(self.chain.trainable(), self.parameters)):
            raise ChainError(
                f"the layers from {self.links[0].path} on have other trainable parameters in the backward pass than in "
                "the forward pass (torch.func.functional_call gives them back before), but this engine reads their "
                "weights in both. Load the parameters into the model, or use an engine for any blocks."
            )

    def check_versions(self) -> None:
        """Refuse to go on with weights or an input that are no longer those of the pass."""
        self.check_parameters()
        if any(tensor._version != version for tensor, version in self._versions):
            raise ChainError(
                f"a weight of the chain from {self.links[0].path}, or its input, was changed in place between the "
                "forward and the backward pass. Step the optimizer after the backward pass, or copy the input."
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
        return replace(link, out=out, state=get_gradient_edge(local))


def _check_samples(link: Link, initial: Tensor) -> None:
    least = 2 if not isinstance(link.block, Convolution) else 2 + len(link.block.kernel_size)
    if link.out.dim() < least or initial.dim() < 2 or len(link.out) != len(initial):
        raise ChainError(
            f"{link.path} returns {tuple(link.out.shape)} for an input of the chain {tuple(initial.shape)}: the first "
            "dimension of every state must be that of the samples. Give the model a batch, x[None] for a single "
            "sample, and reshape samples outside the chain."
        )


def _check_plain(path: str, layer: nn.Module) -> None:
    """Refuse a layer whose calls are no longer its class's own forward, from the recorder's hook to its other one."""
    if role_of(layer) is None:
        raise ChainError(f"{path} computes something else than when the engine was attached. Change it, then attach.")
    *_, innermost = layer._forward_pre_hooks.values()
    for hook in (innermost, next(iter(layer._forward_hooks.values()))):
        if not isinstance(getattr(hook, "__self__", None), BlockRecorder):
            raise ChainError(
                f"{path} has got a forward hook or pre-hook since the engine was attached, that runs between the "
                "layer and the engine and may change what the layer is given or returns. Register it first, then "
                "attach."
            )


def _released(link: Link) -> Link:
    return link if link.out.is_meta else replace(link, out=torch.empty_like(link.out, device="meta"), state=None)


def normalised(error: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's error divided by its norm, and the norms; in single precision at least.

    Args:
        error: (N, ...).

    Returns:
        Shaped like ``error``, and (N,).
    """
    error = error.to(torch.promote_types(error.dtype, torch.float32))
    norms = error.flatten(1).norm(dim=1)
    # The reciprocal of anything smaller is infinite.
    return scaled(error, torch.where(norms > torch.finfo(norms.dtype).tiny, norms.reciprocal(), 0.0)), norms


def scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Return ``x``, (N, ...), times one of ``factors``, (N,), for each sample."""
    return x * factors.view(-1, *[1] * (x.dim() - 1))
