"""Chains of known layers, for engines that send the error back by other means than VJPs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.chain import ChainGradients
from gradfree.chains.survey import LinkFindings
from gradfree.depth.depth_chain import DepthChain
from gradfree.depth.link import Link, local_backward
from gradfree.errors import CHANGED_IN_PLACE, ChainError
from gradfree.layers.roles import Convolution, Role, adjoint, keeps_state, linear_part

ACTIVATION = (Role.POINTWISE, Role.DROPOUT)
"""Roles of layers that count as the activation of the layer with weights before them."""

HAS_LINEAR_PART = (Role.WEIGHTS, Role.LINEAR, Role.MAX)
"""Roles of layers with a linear part, whose transpose an error can go back through."""


class LayerReplay(Protocol):
    """A recorded pass through layers that can be run again, layer by layer.

    Attributes:
        chain: the attached chain of the layers.
        initial: its input.
        parameters: the trainable parameters, in the order of their gradients.
        inputs: the layers' other inputs that need a gradient.
        input_requires_grad: whether the chain's input needs a gradient.
        roles: of the layers.
    """

    chain: Any
    initial: Tensor
    parameters: Sequence[Tensor]
    inputs: list[tuple[Tensor, GradientEdge]]
    input_requires_grad: bool
    roles: list[Role]

    def check_unchanged(self) -> None:
        """Raise if the parameters, their values or the chain's input have changed since the forward pass."""

    def run_again(self, link: Link, x: Tensor) -> Link:
        """Run the layer of ``link`` again on ``x``, with the pass's dropout mask; return the link with a new graph."""


class LayerChain(DepthChain):
    """Links that are single layers, run in order.

    Args:
        recording: the pass.
        links: those that the loss has reached; ``out`` is on the meta device if its values were not stored.
        keep_graph: as in :class:`DepthChain`.
    """

    links: list[Link]

    def __init__(self, recording: LayerReplay, links: list[Link], keep_graph: bool):
        super().__init__(links, recording.parameters, len(recording.inputs), keep_graph, recording.chain)
        self.recording = recording
        self.roles = recording.roles[: len(links)]
        """The roles of the links."""
        self.weighted = [i for i, role in enumerate(self.roles) if role is Role.WEIGHTS]
        """Indices of the links with weights."""
        if not self.weighted:
            raise ChainError(f"none of {links[0].path} to {links[-1].path} has weights: there is nothing to train.")
        self.last = self.weighted[-1]
        """Index of the last link with weights."""

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The index of each layer's link with weights and of the next layer's; without the last layer."""
        return list(pairwise(self.weighted))

    def error(self, direct: Sequence[Cotangent]) -> Tensor:
        """Return the exact cotangent at the output of the last link with weights.

        Raises:
            ChainError: the loss also uses another state; a state is not (samples, ...); or the weights have changed
                since the forward pass.
        """
        self.recording.check_unchanged()
        for link in self.links:
            _check_samples(link, self.recording.initial)
        for link, e in zip(self.links[:-1], direct[:-1], strict=True):
            if e is not None:
                raise ChainError(
                    f"the loss uses the output of {link.path}, which lies inside the chain: this engine only "
                    "takes the error at the chain's end. Leave the layers from there on out of the chain, or use "
                    "another engine."
                )
        cotangent = direct[-1]
        assert cotangent is not None  # The pass leaves out links after the last state with a cotangent.
        for link in reversed(self.links[self.last + 1 :]):
            cotangent = self.vjp(link, cotangent)
        return cotangent

    def survey(self, direct: Sequence[Cotangent]) -> list[LinkFindings]:
        """Return the paths of the layers; their residual path is not needed."""
        return [LinkFindings(link.path) for link in self.links]

    def backpropagate(self, direct: Sequence[Cotangent]) -> ChainGradients:
        """Return the exact gradients; layers whose values were not stored run again first."""
        self.links[:] = [link for link, _ in self.replay()]
        return super().backpropagate(direct)

    def release(self, index: int) -> None:
        """Free the values and the graph of link ``index``, unless its graph must survive."""
        if not self.keep_graph:
            self.links[index] = without_graph(self.links[index])

    def shape(self, index: int) -> torch.Size:
        """Return the shape of the input of link ``index``."""
        return self.recording.initial.shape if index == 0 else self.links[index - 1].out.shape

    def replay(self) -> Iterator[tuple[Link, Tensor]]:
        """Yield every link with its input, in the order of the pass; layers whose values were not stored run again.

        States between a layer and its activation may be freed: they are on the meta device.

        Raises:
            ChainError: weights or input have changed since the forward pass.
        """
        self.recording.check_unchanged()
        x = self.recording.initial
        for link in self.links:
            live = self.recording.run_again(link, x) if link.out.is_meta and link.end is None else link
            yield live, x
            x = live.out.detach()

    def transposed(self, error: Tensor) -> Tensor:
        """Return ``error``, at the output of link :attr:`last`, times the linear parts of this and all earlier links.

        Args:
            error: (N, ...), with any N.

        Returns:
            (N, ...), shaped like the chain's input.
        """
        for i in range(self.last, -1, -1):
            link = self.links[i]
            if self.roles[i] in HAS_LINEAR_PART:
                error = adjoint(link.block, error, self.shape(i))
        return error

    def vjp(self, link: Link, cotangent: Tensor) -> Tensor:
        """Return ``cotangent`` times the exact Jacobian of ``link``."""
        if link.state is None:
            raise ChainError(
                f"the loss uses the output of {link.path}, but no output of the layers after it, which have run, too: "
                "this engine only takes the error at the chain's end. Leave the layers from there on out of the chain, "
                "or use another engine."
            )
        source: Any = link.source
        cotangent = link.writable(cotangent.to(link.out.dtype))
        with local_backward(link.path, [cotangent]):
            return torch.autograd.grad(source, link.state, cotangent, retain_graph=True)[0]

    def backward(self, link: Link, cotangent: Tensor, total: ChainGradients) -> Tensor | None:
        """Add the gradients of the link's parameters, as :meth:`add`; return its exact VJP, or ``None`` if unneeded."""
        delta = None if link.state is None else self.vjp(link, cotangent)
        self.add(link, cotangent, total)  # Frees the graph.
        return delta

    def two_passes(
        self, error: Tensor, shift: Tensor, norms: Tensor | None, *, at_second: bool = False
    ) -> ChainGradients:
        """Return the gradients from differences between two passes; the second starts from the input minus ``shift``.

        The cotangent of a layer with weights is the first pass's output minus the second's, after the activation behind
        it (pointwise functions and dropout), times the norms of the errors; that of the last such layer is the error.
        The chain's input gets ``shift`` times the norms. Links are freed once the second pass has gone through them.

        Args:
            error: the cotangent at the output of link :attr:`last`.
            shift: shaped like the chain's input, of at least single precision, for errors of norm one.
            norms: of the errors, (N,). ``None`` if ``shift`` is for errors that are not normalised: then products of
                the Jacobians with ``shift`` replace the differences.
            at_second: whether weights are multiplied by the inputs of the second pass, not by those of the first one.

        Raises:
            ChainError: as in :meth:`replay`; or the output of a link was changed in place after the link had run.
        """
        for link in self.links[: self.last]:
            if link.has_changed:
                raise CHANGED_IN_PLACE.error(where=link.path)
        total = self.zero()
        if self.recording.input_requires_grad:
            total = total._replace(initial=scaled(shift, norms))
        low = {self.recording.initial.dtype, *(link.out.dtype for link in self.links)} != {shift.dtype}
        # Whether to carry the difference from layer to layer: as precise as it is, not as the states are.
        shifts = low or norms is None
        # The state of the second pass or, with ``shifts``, its difference from that of the first one.
        other = shift if shifts else self.recording.initial - shift
        del shift
        waiting: Link | None = None
        passed = 0
        for i, (link, x) in enumerate(self.replay()):
            role = self.roles[i]
            if waiting is not None and role not in ACTIVATION:
                if shifts:
                    self.add(waiting, scaled(other, norms), total)
                else:
                    assert norms is not None  # Without norms, shifts are carried.
                    # In place, to save memory: a difference is as large as a state.
                    self.add(waiting, (x - other).mul_(_broadcast(norms, x)), total)
                waiting = None
                for j in range(passed, i - 1):
                    self.release(j)
                passed = i - 1
            if role is Role.WEIGHTS:
                waiting = link
                if at_second:
                    waiting = self.recording.run_again(link, (x - other).to(x.dtype) if shifts else other)
            if i == self.last:
                break
            if shifts:
                other = self._next_shift(i, link, x, other, tangent=norms is None)
            elif waiting is not None and role is Role.WEIGHTS and at_second:
                other, waiting = waiting.out.detach(), without_values(waiting)
            else:
                other = self._next_state(role, link, x, other)
        assert waiting is not None  # The last link has weights.
        self.add(waiting, error, total)
        return total

    def run(self, initial: Tensor | None = None, parameters: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run the layers again, with the pass's dropout masks; with other ``parameters``, as blocks without them.

        Raises:
            ChainError: as in :meth:`replay`.
        """
        if parameters is not None:
            return super().run(self.recording.initial if initial is None else initial, parameters)
        states = [self.recording.initial if initial is None else initial]
        with torch.no_grad():
            for i, (link, x) in enumerate(self.replay()):
                states.append(self._again(i, link, x, states[-1]))
        return states[1:]

    def run_part(self, begin: int, end: int, state: Tensor) -> Tensor:
        """Return the state after the links ``begin`` to ``end`` - 1, run on another ``state``; of a stored pass."""
        with torch.no_grad():
            for i in range(begin, end):
                state = self._again(i, self.links[i], self.input_of(i), state)
        return state

    def _again(self, index: int, link: Link, x: Tensor, state: Tensor) -> Tensor:
        """Return the state after ``link``, run on ``state`` in the pass's precision; ``x`` is what it ran on."""
        role = self.roles[index]
        if role is Role.WEIGHTS and not keeps_state(link.block):
            return self.recording.run_again(link, state).out.detach()
        return self._next_state(role, link, x, state)

    def vjp_part(self, begin: int, end: int, cotangent: Tensor) -> Tensor:
        """Return ``cotangent`` times the exact Jacobians of the links ``end`` - 1 to ``begin``."""
        for link in reversed(self.links[begin:end]):
            cotangent = self.vjp(link, cotangent)
        return cotangent

    def activated(self, index: int, x: Tensor) -> Tensor:
        """Return ``x`` after the pointwise functions that lie between link ``index`` and the weights before it."""
        start = max((i for i in self.weighted if i < index), default=index)
        for link, role in zip(self.links[start:index], self.roles[start:index], strict=True):
            if role is Role.POINTWISE:
                x = link.block.forward(x)
        return x

    def _next_state(self, role: Role, link: Link, x: Tensor, second: Tensor) -> Tensor:
        """Return the second pass's state after ``link``, from that before it; ``x`` is the first pass's."""
        if role is Role.DROPOUT:
            # Dropout is linear, and its Jacobian contains the mask.
            return self.vjp(link, second)
        if role is Role.WEIGHTS and keeps_state(link.block):
            return link.out.detach() - linear_part(link.block, x - second)
        return link.block.forward(second)

    def _next_shift(self, index: int, link: Link, x: Tensor, shift: Tensor, *, tangent: bool) -> Tensor:
        """Return the difference of the passes after ``link``, in the precision of ``shift``, that before it."""
        role = self.roles[index]
        if role is Role.DROPOUT or (role is Role.POINTWISE and tangent):
            # Both Jacobians are diagonal, so equal to their transposes; that of dropout contains the mask.
            return self.vjp(link, shift).to(shift.dtype)
        if role not in (Role.POINTWISE, Role.MAX):
            return linear_part(link.block, shift)
        x = (self.input_of(index) if x.is_meta else x).to(shift.dtype, copy=link.in_place)
        run = link.block.forward
        if tangent:
            return torch.func.jvp(run, (x,), (shift,))[1]
        second = run(x - shift)
        return run(x) - second

    def input_of(self, index: int) -> Tensor:
        """Return the input of link ``index`` of a stored pass; compute it again if its values are freed."""
        if index == 0:
            return self.recording.initial
        link = self.links[index - 1]
        if not link.out.is_meta:
            return link.out.detach()
        x = self.input_of(index - 1)
        # Dropout is linear, and its Jacobian contains the mask.
        return self.vjp(link, x) if self.roles[index - 1] is Role.DROPOUT else self.recording.run_again(link, x).out

    def add(self, link: Link, cotangent: Tensor, total: ChainGradients) -> None:
        """Add the gradients of the link's parameters to ``total``, given the cotangent at its output.

        Args:
            link: of :meth:`replay`, or run again.
            cotangent: shaped like its output.
            total: changed in place.
        """
        self._add_local([link.without_state()], [cotangent.to(link.out.dtype)], total, self.keep_graph)


def without_values(link: Link) -> Link:
    """Return ``link`` without its values, but with its graph."""
    if link.out.is_meta:
        return link
    end = get_gradient_edge(link.out)
    return link.with_fields(out=_on_meta(link.out), version=0, root=None, end=end, graph=link.graph)


def without_graph(link: Link) -> Link:
    """Return ``link`` without its values and its graph."""
    graph = link.graph._replace(state=None, entries=())
    return link.with_fields(out=_on_meta(link.out), version=0, root=None, entry=None, end=None, graph=graph)


def _on_meta(out: Tensor) -> Tensor:
    return out if out.is_meta else torch.empty_like(out, device="meta")


def _check_samples(link: Link, initial: Tensor) -> None:
    least = 2 if not isinstance(link.block, Convolution) else 2 + len(link.block.kernel_size)
    if link.out.dim() < least or initial.dim() < 2 or len(link.out) != len(initial):
        raise ChainError(
            f"{link.path!r} returns {tuple(link.out.shape)} for an input of the chain {tuple(initial.shape)}: the "
            "first dimension of every state must be the batch. Give the model a batch, x[None] for a single sample, "
            "and reshape samples outside the chain."
        )


def normalised(error: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's error divided by its norm, and the norms; in single precision at least.

    Args:
        error: (N, ...).

    Returns:
        Shaped like ``error``, and (N,).
    """
    error = error.to(torch.promote_types(error.dtype, torch.float32))
    norms = error.flatten(1).norm(dim=1)
    # The reciprocal of a smaller norm would be infinite.
    return scaled(error, torch.where(norms > torch.finfo(norms.dtype).tiny, norms.reciprocal(), 0.0)), norms


def scaled(x: Tensor, factors: Tensor | None) -> Tensor:
    """Return each sample of ``x``, (N, ...), times its factor of ``factors``, (N,); ``x`` itself for ``None``."""
    return x if factors is None else x * _broadcast(factors, x)


def _broadcast(factors: Tensor, x: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (x.dim() - 1))
