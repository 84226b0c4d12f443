"""Chains of layers that can be taken apart, for engines that do not pull the error back through them."""

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

TAIL = (Role.POINTWISE, Role.DROPOUT)
"""What may follow a layer with weights and still be its own activation."""

LINEAR = (Role.WEIGHTS, Role.LINEAR, Role.MAX)
"""What has a linear part, which an error goes back through."""


class LayerReplay(Protocol):
    """A recorded pass through layers that can be run again, layer by layer.

    Attributes:
        chain: of which the layers are.
        initial: what entered it.
        parameters: trainable ones, in the order of their gradients.
        inputs: other tensors that the layers were given.
        goes_on: whether what lies before the chain needs a gradient.
        roles: of the layers.
    """

    chain: Any
    initial: Tensor
    parameters: Sequence[Tensor]
    inputs: list[tuple[Tensor, GradientEdge]]
    goes_on: bool
    roles: list[Role]

    def check_unchanged(self) -> None:
        """Refuse to go on with other parameters, or other values of these or of the input, than the pass had."""

    def run_again(self, link: Link, x: Tensor) -> Link:
        """Return ``link`` with a graph of its own, for the input ``x``; as in the pass if ``x`` is."""


class Compared(NamedTuple):
    """What two passes have left of one layer with weights.

    Attributes:
        link: the layer, as in :meth:`LayerChain.replay`, or with the second pass's graph.
        difference: how much less left its activation, the pointwise functions and dropout that follow it, brought
            back to the error's norm; ``None`` for the chain's last layer with weights.
    """

    link: Link
    difference: Tensor | None = None


class LayerChain(DepthChain):
    """Links that are single layers, run in order.

    Args:
        recording: the pass.
        links: those that the loss has reached; ``out`` is on the meta device where nothing was stored.
        keep_graph: as in :class:`DepthChain`.
    """

    links: list[Link]

    def __init__(self, recording: LayerReplay, links: list[Link], keep_graph: bool):
        super().__init__(links, recording.parameters, len(recording.inputs), keep_graph, recording.chain)
        self.recording = recording
        self.roles = recording.roles[: len(links)]
        """Of the links, which engines ask for again and again."""
        weighted = [i for i, role in enumerate(self.roles) if role is Role.WEIGHTS]
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
        assert cotangent is not None  # A recording cuts its links behind the last state that has one.
        for link in reversed(self.links[self.last + 1 :]):
            cotangent = self.pulled(link, cotangent)
        return cotangent

    def survey(self, direct: Sequence[Cotangent]) -> list[LinkFindings]:
        """Return the layers: nobody asks them for a residual path."""
        return [LinkFindings(link.path) for link in self.links]

    def backpropagate(self, direct: Sequence[Cotangent]) -> ChainGradients:
        """Return the exact gradients; what was not stored is run again, and stored."""
        self.links[:] = [link for link, _ in self.replay()]
        return super().backpropagate(direct)

    def release(self, index: int) -> None:
        """Let go of link ``index``, unless its graph must survive."""
        if not self.keep_graph:
            self.links[index] = released(self.links[index])

    def zero(self) -> ChainGradients:
        """Return gradients to add to."""
        return self._zero()

    def shape(self, index: int) -> torch.Size:
        """Return the shape of what enters link ``index``."""
        return self.recording.initial.shape if index == 0 else self.links[index - 1].out.shape

    def replay(self) -> Iterator[tuple[Link, Tensor]]:
        """Yield every link with what entered it, in the order of the pass; what was not stored is run again.

        Values inside a layer's own activation may have been let go of: these are on the meta device.

        Raises:
            ChainError: weights or input were changed in place since.
        """
        self.recording.check_unchanged()
        x = self.recording.initial
        for link in self.links:
            live = self.recording.run_again(link, x) if link.out.is_meta and link.end is None else link
            yield live, x
            x = live.out.detach()

    def transposed(self, error: Tensor) -> Tensor:
        """Return ``error``, at the output of link :attr:`last`, times the linear parts of it and all links before.

        Args:
            error: (N, ...); N is free.

        Returns:
            (N, ...), shaped like the chain's input.
        """
        for i in range(self.last, -1, -1):
            link = self.links[i]
            if self.roles[i] in LINEAR:
                error = adjoint(link.block, error, self.shape(i))
        return error

    def pulled(self, link: Link, cotangent: Tensor) -> Tensor:
        """Return ``cotangent`` times the exact Jacobian of ``link``."""
        if link.state is None:
            raise ChainError(
                f"the loss uses the output of {link.path} and of no layer behind it, which have run, too: this engine "
                "only takes the error at the chain's end. Leave the layers from there on out of the chain, or use "
                "another engine."
            )
        source: Any = link.source
        return torch.autograd.grad(source, link.state, cotangent.to(link.out.dtype), retain_graph=True)[0]

    def compared(
        self,
        shift: Tensor,
        norms: Tensor | None,
        *,
        tangent: bool = False,
        second: bool = False,
    ) -> Iterator[Compared]:
        """Run a second pass that starts from less by ``shift``; yield every layer with weights, in order.

        Links that it has passed are not needed any more.

        Args:
            shift: shaped like the chain's input, of at least single precision, for errors of norm one.
            norms: of the errors, (N,); ``None`` if ``shift`` is for errors as they are.
            tangent: whether differences are those of the Jacobians' products with ``shift``.
            second: whether the layers are to have the second pass's graphs, not the first one's.

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

    def _second_pass(self, shift: Tensor, norms: Tensor, graphs: bool) -> Iterator[tuple[int, Compared]]:
        """Run the layers on the second pass's own states; yield with each how many links are passed."""
        run_again, waiting = self.recording.run_again, None
        second = self.recording.initial - shift
        del shift
        for i, (link, x) in enumerate(self.replay()):
            role = self.roles[i]
            if waiting is not None and role not in TAIL:
                # In place: a difference is as large as a state.
                yield i - 1, waiting._replace(difference=(x - second).mul_(_broadcast(norms, x)))
                waiting = None
            if i == self.last:
                yield i, Compared(run_again(link, second) if graphs else link)
                return
            if role is Role.WEIGHTS:
                waiting = Compared(link)
                if graphs:
                    again = run_again(link, second)
                    second, waiting = again.out.detach(), Compared(valueless(again))
                    del again
                elif keeps_state(link.block):
                    second = link.out.detach() - linear_part(link.block, x - second)
                else:
                    second = link.block.forward(second)
            elif role is Role.DROPOUT:
                # Linear: its Jacobian has the mask.
                second = self.pulled(link, second)
            else:
                second = link.block.forward(second)

    def _shifted(
        self, shift: Tensor, norms: Tensor | None, tangent: bool, graphs: bool
    ) -> Iterator[tuple[int, Compared]]:
        """Carry along how much less the second pass has, in more precision than its states may have."""
        waiting = None
        for i, (link, x) in enumerate(self.replay()):
            role = self.roles[i]
            if waiting is not None and role not in TAIL:
                yield i - 1, waiting._replace(difference=scaled(shift, norms))
                waiting = None
            if role is Role.WEIGHTS:
                waiting = Compared(self.recording.run_again(link, (x - shift).to(x.dtype)) if graphs else link)
            if i == self.last:
                assert waiting is not None
                yield i, waiting
                return
            if role is Role.DROPOUT or (role is Role.POINTWISE and tangent):
                # Both Jacobians are diagonal, so their own transposes; a dropout's has the mask.
                shift = self.pulled(link, shift).to(shift.dtype)
            elif role not in (Role.POINTWISE, Role.MAX):
                shift = linear_part(link.block, shift)
            else:
                x = (self._entered(i) if x.is_meta else x).to(shift.dtype)
                run = link.block.forward
                shift = torch.func.jvp(run, (x,), (shift,))[1] if tangent else run(x) - run(x - shift)

    def _entered(self, index: int) -> Tensor:
        """Return what entered link ``index``, of a stored pass, where its values have been let go of, too."""
        if index == 0:
            return self.recording.initial
        link = self.links[index - 1]
        if not link.out.is_meta:
            return link.out.detach()
        x = self._entered(index - 1)
        # A dropout is linear: its Jacobian has the mask.
        return self.pulled(link, x) if self.roles[index - 1] is Role.DROPOUT else self.recording.run_again(link, x).out

    def add_compared(self, compared: Iterable[Compared], error: Tensor, total: ChainGradients) -> None:
        """Add the gradients of all layers that two passes have left, one at a time.

        Args:
            compared: the layers.
            error: the cotangent at the output of one without a difference.
            total: is changed.
        """
        for found in compared:
            self.add(found.link, error if found.difference is None else found.difference, total)
            # Not while the next layer is run: a difference is as large as a state.
            del found

    def add(self, link: Link, cotangent: Tensor, total: ChainGradients) -> None:
        """Add the gradients of the link's parameters to ``total``, given the cotangent at its output.

        Args:
            link: of :meth:`replay`, or run again.
            cotangent: shaped like its output.
            total: is changed.
        """
        self._add_local([link.with_fields(state=None)], [cotangent.to(link.out.dtype)], total, self.keep_graph)


def valueless(link: Link) -> Link:
    """Return ``link`` without its values, but with its graph."""
    if link.out.is_meta:
        return link
    return link.with_fields(out=_without_values(link.out), version=0, root=None, end=get_gradient_edge(link.out))


def released(link: Link) -> Link:
    """Return ``link`` without its values and its graph."""
    return link.with_fields(out=_without_values(link.out), version=0, root=None, state=None, end=None, entries=())


def _without_values(out: Tensor) -> Tensor:
    return out if out.is_meta else torch.empty_like(out, device="meta")


def _check_samples(link: Link, initial: Tensor) -> None:
    least = 2 if not isinstance(link.block, Convolution) else 2 + len(link.block.kernel_size)
    if link.out.dim() < least or initial.dim() < 2 or len(link.out) != len(initial):
        raise ChainError(
            f"{link.path} returns {tuple(link.out.shape)} for an input of the chain {tuple(initial.shape)}: the first "
            "dimension of every state must be that of the samples. Give the model a batch, x[None] for a single "
            "sample, and reshape samples outside the chain."
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
    # The reciprocal of anything smaller is infinite.
    return scaled(error, torch.where(norms > torch.finfo(norms.dtype).tiny, norms.reciprocal(), 0.0)), norms


def scaled(x: Tensor, factors: Tensor | None) -> Tensor:
    """Return ``x``, (N, ...), times one of ``factors``, (N,), for each sample; as it is where there are none."""
    return x if factors is None else x * _broadcast(factors, x)


def _broadcast(factors: Tensor, x: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (x.dim() - 1))
