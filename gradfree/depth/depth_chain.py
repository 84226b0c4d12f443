"""Chains in depth: each link is a module with a separate autograd graph, and a state is one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor, is_number, plus, reverse_scan, times
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import running_mean
from gradfree.chains.solving import Attachment
from gradfree.chains.survey import LinkFindings
from gradfree.depth.block_jacobians import Mixing, jacobians, jvps, vectors, width
from gradfree.depth.link import Link, local_backward, span
from gradfree.depth.run_again import run_again
from gradfree.devices.costs import costs_of
from gradfree.errors import ChainError
from gradfree.torchside.guards import check_finite
from gradfree.torchside.hooks import without_hooks


class Attached(Protocol):
    """A chain of a model that has an engine attached.

    Attributes:
        attachment: solves the chain.
        mixing: checks that blocks do not mix the samples of a batch.
        declared: the residual path of every link that keeps the state's shape; ``None``: it is read from the graphs.
        requires_residual: whether a chain without a residual path is an error for engines that need one.
        joined: the paths of the blocks that have been solved together with others.
    """

    attachment: Attachment
    mixing: Mixing
    declared: float | None
    requires_residual: bool
    joined: set[str]


NO_RESIDUAL = (
    "no residual path from {first!r} to {last!r}: no block's output is x + g(x), ReLU(x + g(x)), LayerNorm(x + g(x)) "
    "or another sum with its input x that autograd can see (a compiled block hides it). If there is one, "
    "declare it: residual=1.0, an argument of attach, EngineOptimizer, EngineStrategy and EngineCallback. The engines "
    "'fixed_point' and 'truncated' need none."
)


class DepthChain(Chain):
    """Links with separate graphs. Cotangents and factors are lists with one entry per link.

    Args:
        links: in the order of the forward pass. The last one's output must have a cotangent.
        parameters: every trainable parameter of the chain, each once.
        inputs: the number of input tensors of the links, without the states.
        keep_graph: whether the graphs must survive (``retain_graph`` of the running backward pass).
        chain: the attached chain that was recorded.
    """

    before: torch.Size | None = None
    """The shape of the first link's input state if that is a state of the chain on another rank."""

    initial: Tensor | None = None
    """h_0; ``None`` if it is not kept."""

    def __init__(
        self,
        links: list[Link],
        parameters: Sequence[Tensor],
        inputs: int,
        keep_graph: bool,
        chain: Attached,
    ):
        self.links, self.like = links, links[-1].out
        self._set_common(parameters, inputs, keep_graph, chain)

    def _set_common(self, parameters: Sequence[Tensor], inputs: int, keep_graph: bool, chain: Attached) -> None:
        self.parameters, self.inputs, self.keep_graph = parameters, inputs, keep_graph
        self.memory, self.mixing = chain.attachment.memory, chain.mixing
        self.declared, self.requires_residual = chain.declared, chain.requires_residual

    def __len__(self) -> int:
        """L, the number of links."""
        return len(self.links)

    def constant(self, factor: Factor) -> list[Factor]:
        """Return the factors K_i = diag(``factor``), zero for links that do not depend on the state before them.

        Args:
            factor: a number, or a tensor that broadcasts to a state.

        Raises:
            ChainError: ``factor`` is not zero, and a state has another shape than the one before it.
        """
        if not is_number(factor, 0.0):
            for before, link in self._shapes():
                if link.state is not None and before not in (None, link.out.shape):
                    raise ChainError(
                        f"{link.path} turns a state of shape {tuple(before or ())} into one of "
                        f"{tuple(link.out.shape)}: one diagonal for all links needs states of one shape. Attach one "
                        "chain for each shape, chains=[...], or use the engine 'fixed_point' or 'truncated'."
                    )
        return [0.0 if link.state is None else factor for link in self.links]

    def residual(self, weight: float = 1.0) -> list[Factor]:
        """Return ``weight`` · K_i, read from each block's graph; see :attr:`~.link.Link.residual`."""
        if weight == 0.0:
            return self.constant(0.0)
        with local_backward(span(self.links[::-1]), ()):
            factors = [residual_of(before, link, self.declared) for before, link in self._shapes()]
        # Without a block that keeps the shape, no residual path can be expected.
        kept = any(before == link.out.shape for before, link in self._shapes())
        if self.requires_residual and self.declared is None and kept and all(is_number(f, 0.0) for f in factors):
            raise ChainError(NO_RESIDUAL.format(first=self.links[0].path, last=self.links[-1].path))
        if weight == 1.0:
            return factors
        # A mask times a number would be of torch's default dtype.
        return [
            (f.to(link.out.dtype) if isinstance(f, Tensor) and f.dtype is torch.bool else f) * weight
            for f, link in zip(factors, self.links, strict=True)
        ]

    def _shapes(self) -> list[tuple[torch.Size | None, Link]]:
        """Return each link with the shape of the state before it; ``None`` if that is no state of the chain."""
        return list(zip([self.before, *(link.out.shape for link in self.links[:-1])], self.links, strict=True))

    def mean_residual(self, momentum: float) -> list[Factor]:
        """Return the running mean of the residual path's diagonal: one number for all links and units."""
        wide = torch.promote_types(self.like.dtype, torch.float32)
        means = [
            f.to(wide).mean() if isinstance(f, Tensor) else self.like.new_full((), f, dtype=wide)
            for f in self.residual()[1:]
        ]
        if not means:
            return self.constant(0.0)
        mean = torch.stack(means).mean()
        return self.constant(running_mean(self.memory, "residual", mean, momentum))

    def scan(self, terms: Sequence[Cotangent], factors: Sequence[Factor]) -> list[Cotangent]:
        """Solve δ_i = terms_i + δ_{i+1} K_{i+1}."""
        return reverse_scan(terms, factors)

    def sweep_factors(self, factors: Sequence[Factor], exact: int) -> Sequence[Factor]:
        """Return ``factors``, zero for the last ``exact`` links."""
        return [*factors[:-exact], *[0.0] * min(exact, len(self))]

    def pull(
        self, direct: Sequence[Cotangent], delta: Sequence[Cotangent], factors: Sequence[Factor]
    ) -> list[Cotangent]:
        """Return e_i + δ_{i+1} (F_{i+1} - K_{i+1}): one autograd call over all links' separate graphs."""
        result = list(direct)
        later = range(1, len(self))
        for i, v in zip(later, self.vjps(later, delta[1:]), strict=True):
            known = times(delta[i], factors[i])
            result[i - 1] = plus(result[i - 1], plus(v, None if known is None else -known))
        return result

    def vjps(self, indices: Sequence[int], delta: Sequence[Cotangent]) -> list[Cotangent]:
        """Return δ_i F_i of the links ``indices``, in one autograd call."""
        result: list[Cotangent] = [None] * len(indices)
        live = [n for n, i in enumerate(indices) if delta[n] is not None and self.links[i].state is not None]
        for group in _groups(live[::-1]):
            links, cotangents = [self.links[indices[n]] for n in group], [delta[n] for n in group]
            with local_backward(span(links), cotangents):
                vjps = torch.autograd.grad(
                    [link.source for link in links],  # type: ignore[arg-type]
                    [link.state for link in links],  # type: ignore[arg-type]
                    [link.writable(d) for link, d in zip(links, cotangents, strict=True)],  # type: ignore[arg-type]
                    retain_graph=True,
                    allow_unused=True,
                )
            for n, v in zip(group, vjps, strict=True):
                result[n] = v
        return result

    def survey(self, direct: Sequence[Cotangent]) -> list[LinkFindings]:
        """Return the findings about each link, with exact cotangents for all states."""
        found: list[LinkFindings] = []
        delta: Cotangent = None
        for i in reversed(range(len(self))):
            link, delta = self.links[i], plus(direct[i], delta)
            (vjp,) = self.vjps([i], [delta])
            same = vjp is not None and vjp.shape == link.out.shape
            factor = residual_of(link.out.shape, link, self.declared) if same else 0.0
            found.append(LinkFindings.of_link(link.path, factor, delta, vjp))
            delta = vjp
        return found[::-1]

    def vectors(self, cotangents: Sequence[Cotangent]) -> Tensor:
        """Return the cotangents as row vectors, (L, B, H); the first dimension of a state must be the batch."""
        return vectors(self.links, cotangents)

    def jacobians(self) -> Tensor:
        """Return F_2 to F_L of every sample, (L - 1, B, H, H), by H VJPs of all links at once."""
        return jacobians(self.links, self.mixing)

    def jvps(self, tangents: Tensor) -> Tensor:
        """Return w_i = F_i (w_{i-1} + v_{i-1}) of every sample, (N, L, B, H)."""
        return jvps(self.links, tangents, self.mixing)

    def run(self, initial: Tensor | None = None, parameters: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run the blocks again, one by one and in their present mode; dropout draws other masks.

        Raises:
            ChainError: a block was called with other arguments than its state, or h_0 is not kept.
        """
        first = self.initial if initial is None else initial
        if first is None:
            raise ChainError(f"the input of {self.links[0].path} is not kept here: give it, chain.run(initial=...).")
        for link in self.links:
            if not link.only_state:
                raise ChainError(
                    f"{link.path} was called with other arguments than its state, which are not kept, so the chain "
                    "cannot be run again. Let the block take its state only."
                )
        given = () if parameters is None else zip(map(id, self.parameters), parameters, strict=True)
        return run_again([(link.path, link.block) for link in self.links], first, dict(given))

    def cotangents(self, vectors: Tensor, direct: Sequence[Cotangent]) -> list[Cotangent]:
        """Undo :meth:`vectors`; ``None`` for states that no direct cotangent reaches."""
        result: list[Cotangent] = [None] * len(self)
        reached = False
        for i in reversed(range(len(self))):
            reached = direct[i] is not None or (reached and self.links[i + 1].state is not None)
            if reached:
                out = self.links[i].out
                samples = vectors[i][:, : width(out)]
                result[i] = samples.reshape(out.shape).to(out.dtype)
        return result

    def backpropagate(self, direct: Sequence[Cotangent]) -> ChainGradients:
        """Return the exact gradients; each block's graph is walked once and then freed."""
        total = self.zero()
        carried: Cotangent = None
        for i in reversed(range(len(self))):
            delta = plus(direct[i], carried)
            # keep=True: blocks may share parts of their graphs, so autograd must not free one during its walk.
            carried = None if delta is None else self._add_local([self.links[i]], [delta], total, keep=True)
            self.release(i)
        return total._replace(initial=carried)

    def release(self, index: int) -> None:
        """Free link ``index``, unless its graph must survive."""
        if not self.keep_graph:
            del self.links[index]

    def gradients(self, delta: Sequence[Cotangent]) -> ChainGradients:
        """Return δ_i ∂f_i/∂θ_i of all links, and δ_1 F_1; each block's graph is walked once and then freed.

        Where δ_i is ``None`` but backpropagation would reach the link, its parameters get zeros: DDP's reducer waits
        for their gradients.
        """
        dense: dict[int, Tensor] = {}
        for i in reversed(range(len(self))):
            d = delta[i]
            if d is not None or (i + 1 in dense and self.links[i + 1].state is not None):
                dense[i] = torch.zeros_like(self.links[i].out) if d is None else d
        total = self.zero()
        initial: Cotangent = None
        # Alone, a block computes no gradient of its input: one matrix product less for each linear layer. But each call
        # visits the anchors of all earlier blocks.
        walks = costs_of(self.like.device).separate_walks
        groups = _groups(list(dense), separate=len(dense) <= walks)
        for group in groups:
            links, cotangents = [self.links[i] for i in group], [dense[i] for i in group]
            if group[-1] > 0:
                links[-1] = links[-1].without_state()
            initial = self._add_local(links, cotangents, total, keep=self.keep_graph or len(groups) > 1)
            for i in group:
                self.release(i)
        return total._replace(initial=initial)

    def zero(self) -> ChainGradients:
        """Return empty gradients."""
        return ChainGradients(None, [None] * self.inputs, [None] * len(self.parameters))

    def _add_local(
        self, links: Sequence[Link], delta: Sequence[Tensor], total: ChainGradients, keep: bool
    ) -> Cotangent:
        """Add the VJPs of ``links`` with respect to inputs and parameters to ``total``.

        Args:
            links: from the end of the chain on.
            delta: the cotangents of their outputs.
            total: the gradients so far.
            keep: whether the graphs must survive.

        Returns:
            The cotangent of the state before the last of ``links``.
        """
        for link, d in zip(links, delta, strict=True):
            check_finite([d], link.path)
            if self.deltas is not None:
                self.deltas[link.path] = d.detach()
        # A parameter may have been frozen after the forward pass: it gets no gradient, as in autograd.
        numbers = sorted({n for link in links for n in link.parameters if self.parameters[n].requires_grad})
        entries = [(n, edge) for link in links for n, edge in link.graph.inputs]
        first = [] if links[-1].state is None else [links[-1].state]
        leaves = [self.parameters[n] for n in numbers]
        if not first and not entries and not leaves:
            return None
        with local_backward(span(links), delta), without_hooks(leaves):
            grads = iter(
                torch.autograd.grad(
                    [link.source for link in links],  # type: ignore[arg-type]
                    [*first, *(edge for _, edge in entries), *leaves],  # type: ignore[arg-type]
                    [link.writable(d) for link, d in zip(links, delta, strict=True)],
                    retain_graph=keep,
                    allow_unused=True,
                )
            )
        initial = next(grads) if first else None
        for n, _ in entries:
            total.inputs[n] = plus(total.inputs[n], next(grads))
        for n in numbers:
            total.parameters[n] = plus(total.parameters[n], next(grads))
        return initial


def residual_of(before: torch.Size | None, link: Link, declared: float | None) -> Factor:
    """Return K of ``link``; zero if the link changes the shape ``before``, or has no state before it."""
    if link.state is None or before != link.out.shape:
        return 0.0
    return link.residual if declared is None else declared


def _groups(indices: Sequence[int], separate: bool = False) -> list[Sequence[int]]:
    """Return the links of each autograd call: all, or one per call; also under anomaly detection, to name the link."""
    if separate or torch.is_anomaly_enabled():
        return [[i] for i in indices]
    return [indices] if indices else []
