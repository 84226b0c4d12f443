"""Chains of known layers, for engines that send the error back by other means than VJPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.chain import ChainGradients
from gradfree.chains.survey import LinkFindings
from gradfree.depth.depth_chain import DepthChain
from gradfree.depth.link import Link
from gradfree.errors import ChainError
from gradfree.layers.roles import Convolution, Role, adjoint, keeps_state, linear_part
from gradfree.torchside.guards import refuse_batched

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


class ComparedLayer(NamedTuple):
    """One layer with weights, after a first and a second pass through it.

    Attributes:
        link: the layer, as in :meth:`LayerChain.replay`, or with the second pass's graph.
        difference: the first pass's output minus the second's, after the layer's activation (pointwise functions and
            dropout), times the norms of the errors; ``None`` for the chain's last layer with weights.
    """

    link: Link
    difference: Tensor | None = None


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
        weighted = [i for i, role in enumerate(self.roles) if role is Role.WEIGHTS]
        if not weighted:
            raise ChainError(f"none of {links[0].path} to {links[-1].path} has weights: there is nothing to train.")
        self.last = weighted[-1]
        """Index of the last link with weights."""

    def error(self, direct: Sequence[Cotangent]) -> Tensor:
        """Return the exact cotangent at the output of the last link with weights.

        Raises:
            ChainError: the loss also uses another state; a state is not (samples, ...); or the weights have changed
                since the forward pass.
        """
        refuse_batched(direct, self.links[0].path)
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

    def zero(self) -> ChainGradients:
        """Return empty gradients, for :meth:`add`."""
        return self._zero()

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
        return torch.autograd.grad(source, link.state, cotangent.to(link.out.dtype), retain_graph=True)[0]

    def compare_passes(
        self,
        shift: Tensor,
        norms: Tensor | None,
        *,
        tangent: bool = False,
        second: bool = False,
    ) -> Iterator[ComparedLayer]:
        """Run a second pass on the chain's input minus ``shift``; yield every layer with weights, in order.

        Frees each link that the second pass has gone through.

        Args:
            shift: shaped like the chain's input, of at least single precision, for errors of norm one.
            norms: of the errors, (N,); ``None`` if ``shift`` is for errors that are not normalised.
            tangent: whether to yield products of the Jacobians with ``shift`` in place of differences.
            second: whether the layers have the second pass's graphs, not the first one's.

        Raises:
            ChainError: as in :meth:`replay`.
        """
        low = {self.recording.initial.dtype, *(link.out.dtype for link in self.links)} != {shift.dtype}
        if tangent or low or norms is None:
            walk = self._shifted(shift, norms, tangent, second)
        else:
            walk = self._second_pass(shift, norms, second)
        del shift
        passed = 0
        for i, found in walk:
            yield found
            del found
            for j in range(passed, i):
                self.release(j)
            passed = max(passed, i)

    def _second_pass(self, shift: Tensor, norms: Tensor, graphs: bool) -> Iterator[tuple[int, ComparedLayer]]:
        """Compute the second pass's states; yield the number of finished links with each compared layer."""
        run_again, waiting = self.recording.run_again, None
        second = self.recording.initial - shift
        del shift
        for i, (link, x) in enumerate(self.replay()):
            role = self.roles[i]
            if waiting is not None and role not in ACTIVATION:
                # In place, to save memory: a difference is as large as a state.
                yield i - 1, waiting._replace(difference=(x - second).mul_(_broadcast(norms, x)))
                waiting = None
            if i == self.last:
                yield i, ComparedLayer(run_again(link, second) if graphs else link)
                return
            if role is Role.WEIGHTS:
                waiting = ComparedLayer(link)
                if graphs:
                    again = run_again(link, second)
                    second, waiting = again.out.detach(), ComparedLayer(without_values(again))
                    del again
                elif keeps_state(link.block):
                    second = link.out.detach() - linear_part(link.block, x - second)
                else:
                    second = link.block.forward(second)
            elif role is Role.DROPOUT:
                # Dropout is linear, and its Jacobian contains the mask.
                second = self.vjp(link, second)
            else:
                second = link.block.forward(second)

    def _shifted(
        self, shift: Tensor, norms: Tensor | None, tangent: bool, graphs: bool
    ) -> Iterator[tuple[int, ComparedLayer]]:
        """Compute the difference of the passes, layer by layer, in the precision of ``shift``, not of the states."""
        waiting = None
        for i, (link, x) in enumerate(self.replay()):
            role = self.roles[i]
            if waiting is not None and role not in ACTIVATION:
                yield i - 1, waiting._replace(difference=scaled(shift, norms))
                waiting = None
            if role is Role.WEIGHTS:
                waiting = ComparedLayer(self.recording.run_again(link, (x - shift).to(x.dtype)) if graphs else link)
            if i == self.last:
                assert waiting is not None
                yield i, waiting
                return
            if role is Role.DROPOUT or (role is Role.POINTWISE and tangent):
                # Both Jacobians are diagonal, so equal to their transposes; that of dropout contains the mask.
                shift = self.vjp(link, shift).to(shift.dtype)
            elif role not in (Role.POINTWISE, Role.MAX):
                shift = linear_part(link.block, shift)
            else:
                x = (self._entered(i) if x.is_meta else x).to(shift.dtype)
                run = link.block.forward
                shift = torch.func.jvp(run, (x,), (shift,))[1] if tangent else run(x) - run(x - shift)

    def _entered(self, index: int) -> Tensor:
        """Return the input of link ``index`` of a stored pass; compute it again if its values are freed."""
        if index == 0:
            return self.recording.initial
        link = self.links[index - 1]
        if not link.out.is_meta:
            return link.out.detach()
        x = self._entered(index - 1)
        # Dropout is linear, and its Jacobian contains the mask.
        return self.vjp(link, x) if self.roles[index - 1] is Role.DROPOUT else self.recording.run_again(link, x).out

    def add_compared(self, compared: Iterable[ComparedLayer], error: Tensor, total: ChainGradients) -> None:
        """Add the gradients of all layers of :meth:`compare_passes` to ``total``, one layer at a time.

        Args:
            compared: the layers.
            error: the cotangent at the output of a layer without a difference.
            total: changed in place.
        """
        for found in compared:
            self.add(found.link, error if found.difference is None else found.difference, total)
            # Free the difference, which is as large as a state, before the next layer runs.
            del found

    def add(self, link: Link, cotangent: Tensor, total: ChainGradients) -> None:
        """Add the gradients of the link's parameters to ``total``, given the cotangent at its output.

        Args:
            link: of :meth:`replay`, or run again.
            cotangent: shaped like its output.
            total: changed in place.
        """
        self._add_local([link.with_fields(state=None)], [cotangent.to(link.out.dtype)], total, self.keep_graph)


def without_values(link: Link) -> Link:
    """Return ``link`` without its values, but with its graph."""
    if link.out.is_meta:
        return link
    return link.with_fields(out=_on_meta(link.out), version=0, root=None, end=get_gradient_edge(link.out))


def without_graph(link: Link) -> Link:
    """Return ``link`` without its values and its graph."""
    return link.with_fields(out=_on_meta(link.out), version=0, root=None, state=None, end=None, entries=())


def _on_meta(out: Tensor) -> Tensor:
    return out if out.is_meta else torch.empty_like(out, device="meta")


def _check_samples(link: Link, initial: Tensor) -> None:
    least = 2 if not isinstance(link.block, Convolution) else 2 + len(link.block.kernel_size)
    if link.out.dim() < least or initial.dim() < 2 or len(link.out) != len(initial):
        raise ChainError(
            f"{link.path} returns {tuple(link.out.shape)} for an input of the chain {tuple(initial.shape)}: the first "
            "dimension of every state must be the batch. Give the model a batch, x[None] for a single sample, and "
            "reshape samples outside the chain."
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
