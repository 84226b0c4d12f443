"""Chains in time: one cell applied at T steps, all links of a layer in one batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradfree.algebra.block_scan import Blocks
from gradfree.algebra.cotangents import Factor, is_number, plus
from gradfree.algebra.time_scan import scan_along
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import Memory, running_mean
from gradfree.chains.survey import LinkFindings, share
from gradfree.errors import ChainError
from gradfree.time.closed_forms import Links, State

Factors = tuple[Factor, ...]
"""K_t of all t, part by part of the state: a number, (H,) or (T, B, H)."""


class TimeChain(Chain):
    """T links with shared parameters, B sequences at once. Cotangents are one (T, B, H) tensor for each part."""

    states: Sequence[Tensor]
    """h_1 to h_T, (T, B, ·): one tensor for each part, or one of the same shape."""

    forward_pass: object = None
    """Data that the engine's own forward pass keeps for the backward pass."""

    kind: str
    """The kind of cell: :attr:`~gradfree.time.forward.Recurrence.kind`."""

    valid: Tensor | None = None
    """Mask of the steps that are not padding, (T, B, 1); ``None`` without padding."""

    def __init__(self, length: int, like: Tensor, memory: Memory):
        self.length, self.like, self.memory = length, like, memory

    @property
    @abstractmethod
    def diagonal(self) -> Sequence[Factor]:
        """The diagonal of F_t that comes from the cell's gates, by part of the state: (T, B, H), or 0.0."""

    @property
    @abstractmethod
    def ends(self) -> tuple[Tensor, Tensor]:
        """The first part of the state before the first step and after the last one, (B, H)."""

    def __len__(self) -> int:
        """T, the number of steps."""
        return self.length

    def constant(self, factor: Factor) -> Factors:
        """Return K_t = ``factor`` for every part."""
        return (factor,) * len(self.states)

    def residual(self, weight: float = 1.0) -> Factors:
        """Return ``weight`` times the gates' diagonal."""
        if weight == 0.0:
            return self.constant(0.0)
        if all(is_number(d, 0.0) for d in self.diagonal):
            raise ChainError(
                "the cell has no gate that carries its state from step to step. Use an engine that needs no gate: "
                "'fixed_point' or 'truncated', or 'dsf' with a number as feedback."
            )
        return tuple(d if weight == 1.0 else d * weight for d in self.diagonal)

    def mean_residual(self, momentum: float) -> Factors:
        """Return the running mean of the gates over steps and sequences, unit by unit."""
        return tuple(
            running_mean(self.memory, f"{self.path}.{n}", self._mean(d), momentum) if isinstance(d, Tensor) else d
            for n, d in enumerate(self.residual())
        )

    def _mean(self, d: Tensor) -> Tensor:
        """Return the mean over steps and sequences, without padding."""
        d = d.to(torch.promote_types(d.dtype, torch.float32))
        return d.mean((0, 1)) if self.valid is None else (d * self.valid).sum((0, 1)) / self.valid.sum()

    def scan(self, terms: State, factors: Factors) -> State:
        """Solve δ_t = terms_t + δ_{t+1} K_{t+1}, separately for each part."""
        pairs = zip(terms, factors, strict=True)
        return tuple(None if part is None else scan_along(part, factor) for part, factor in pairs)

    def pull(self, direct: State, delta: State, factors: Factors) -> State:
        """Return e_t + δ_{t+1} (F_{t+1} - K_{t+1}) for all t at once."""
        return tuple(map(shifted_sum, direct, self.rest_vjp(delta, factors)))

    def backpropagate(self, direct: State) -> ChainGradients:
        """Return the exact gradients: δ step by step, everything else at once."""
        return self.gradients(self.rearranged(lambda x: x).unroll(direct))

    def record_delta(self, delta: State) -> None:
        """Store δ of the layer's output in :attr:`deltas`, if requested."""
        if self.deltas is not None and delta[0] is not None:
            self.deltas[self.path] = delta[0].detach()

    def survey(self, direct: State) -> list[LinkFindings]:
        """Return the gates' mean, and the share of the exact VJP that the gates explain."""
        gates = [self._mean(d).mean() for d in self.diagonal if isinstance(d, Tensor)]
        delta = self.rearranged(lambda x: x).unroll(direct)
        exact = self.rest_vjp(delta, self.constant(0.0))
        rest = self.rest_vjp(delta, self.residual()) if gates else exact
        carried = [plus(v, None if r is None else -r) for v, r in zip(exact, rest, strict=True)]
        mean = torch.stack(gates).mean().item() if gates else 0.0
        return [LinkFindings(self.path, mean, share(carried, exact))]

    def vectors(self, cotangents: State) -> Tensor:
        """Return the cotangents as row vectors, the parts of a state side by side, (T, B, H)."""
        wide = torch.promote_types(self.like.dtype, torch.float32)
        pairs = zip(cotangents, self.states, strict=True)
        return torch.cat([(torch.zeros_like(s) if e is None else e).flatten(2).to(wide) for e, s in pairs], -1)

    def cotangents(self, vectors: Tensor, direct: State) -> State:
        """Undo :meth:`vectors`."""
        parts = vectors.split([s.shape[2:].numel() for s in self.states], -1)
        return tuple(
            part.reshape(*part.shape[:2], *s.shape[2:]).to(s.dtype) for part, s in zip(parts, self.states, strict=True)
        )

    def jvps(self, tangents: Tensor) -> Tensor:
        """Return w_t = F_t (w_{t-1} + v_{t-1}) of every sequence, (N, T, B, H), the parts of a state side by side."""
        links = self.repeated_links(len(tangents))
        v = self.cotangents(tangents.transpose(0, 1).flatten(1, 2), ())
        w = [torch.zeros_like(part) for part in v]
        for t in range(1, len(self)):
            found = links.jvp([a[t - 1] + b[t - 1] for a, b in zip(w, v, strict=True)], t)
            for part, of_step in zip(w, found, strict=True):
                part[t] = of_step
        side_by_side = torch.cat([part.flatten(2) for part in w], -1).to(tangents.dtype)
        return side_by_side.unflatten(1, (len(tangents), -1)).transpose(0, 1)

    @abstractmethod
    def sample_gradients(self, delta: State, steps: slice = slice(None), sets: int = 1) -> list[Tensor | None]:
        """Return δ_t ∂f_t/∂θ of each sequence by itself, summed over some steps.

        Args:
            delta: N sets of cotangents of these steps, part by part, (steps, N · B, H).
            steps: the steps; by default all.
            sets: N.

        Returns:
            For each parameter (B, N, ...), its own shape at the end, in the order of :meth:`gradients`; ``None`` if it
            is not trained.
        """

    def repeated_links(self, sets: int) -> Links:
        """Return the links for N sets of cotangents, (T, N · B, H), in place of one."""
        return self.rearranged(lambda x: repeated(x, sets))

    @abstractmethod
    def unit_blocks(self, carried: bool) -> Blocks:
        """Return the unit-by-unit Jacobians of each F_t, from each part of the previous state to each part.

        Args:
            carried: whether to leave out the path through W_hh from a unit to itself.
        """

    @abstractmethod
    def rest_vjp(self, delta: State, factors: Factors) -> State:
        """Return δ_t (F_t - K_t) for t = 2..T."""

    @abstractmethod
    def rearranged(self, change: Callable[[Tensor], Tensor]) -> Links:
        """Return the links with steps and sequences in another order: ``change`` of each (T, B, ...) tensor."""


def repeated(x: Tensor, sets: int) -> Tensor:
    """Return ``x``, (T, B, ...), with the sequences repeated, (T, N · B, ...)."""
    return x if sets == 1 else x.repeat(1, sets, *[1] * (x.dim() - 2))


def shifted_sum(direct: Tensor | None, rest_vjp: Tensor | None) -> Tensor | None:
    """Return e_t + v_{t+1}."""
    if rest_vjp is None:
        return direct
    if direct is None:
        return torch.cat([rest_vjp, rest_vjp.new_zeros(1, *rest_vjp.shape[1:])])
    return torch.cat([direct[:-1] + rest_vjp, direct[-1:]])
