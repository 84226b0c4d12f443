"""Chains in time: one cell applied at T steps, all links of a layer in one batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfree.cells import State, linearise
from gradfree.chain import Chain, ChainError, ChainGradients
from gradfree.gru_forward import Gates
from gradfree.scan import Factor, is_number, plus, running_mean, times
from gradfree.time_scan import scan


@dataclass(frozen=True)
class Split:
    """F_t = K_t + J_t for all t, part by part of the state.

    Attributes:
        known: K, a number, (H,) or (T, B, H).
        rest: what of the cell's own diagonal K leaves to J; 0.0 if nothing.
        crossing: how much of what one part of the state sends to another K takes, from 0 to 1.
    """

    known: Sequence[Factor]
    rest: Sequence[Factor]
    crossing: float = 0.0


class TimeChain(Chain):
    """T links with shared parameters, B sequences at once. Cotangents are one (T, B, H) tensor for each part."""

    diagonal: Sequence[Factor]
    """The part of each F_t that the cell's gates carry, by part of the state: (T, B, H), or 0.0."""

    parameters: Sequence[Tensor]
    """What the links share, in the order of :meth:`gradients`."""

    inside: Tensor | None = None
    """Which steps of which sequences are no padding, (T, B, 1); ``None`` if all."""

    def __init__(self, length: int, like: Tensor, memory: dict[str, Tensor], name: str):
        self.length, self.like, self.memory, self.name = length, like, memory, name

    def __len__(self) -> int:
        """T, the number of steps."""
        return self.length

    def constant(self, factor: Factor) -> Split:
        """Return K_t = ``factor`` for every part."""
        return self._split([factor] * len(self.diagonal))

    def residual(self, weight: float = 1.0, block: bool = False) -> Split:
        """Return ``weight`` times the gates' diagonal, or with ``block`` each unit's whole block."""
        if weight == 0.0:
            return self.constant(0.0)
        if all(is_number(d, 0.0) for d in self.diagonal):
            raise ChainError(
                "the cell has no gate that carries its state from step to step. Use the engine 'fixed_point', "
                "'truncated' or 'dsf', which need none."
            )
        crossing = weight if block else 0.0
        if weight == 1.0:
            return Split(self.diagonal, [0.0] * len(self.diagonal), crossing)
        return Split([d * weight for d in self.diagonal], [d * (1.0 - weight) for d in self.diagonal], crossing)

    def mean_residual(self, momentum: float) -> Split:
        """Return the running mean of the gates over steps and sequences, unit by unit."""
        return self._split(
            [
                running_mean(self.memory, f"{self.name}.{n}", self._mean(d), momentum) if isinstance(d, Tensor) else d
                for n, d in enumerate(self.residual().known)
            ]
        )

    def _mean(self, d: Tensor) -> Tensor:
        """Return the mean over the steps that are no padding."""
        d = d.to(torch.promote_types(d.dtype, torch.float32))
        return d.mean((0, 1)) if self.inside is None else (d * self.inside).sum((0, 1)) / self.inside.sum()

    def _split(self, known: Sequence[Factor]) -> Split:
        return Split(known, list(map(_minus, self.diagonal, known)))

    def scan(self, terms: State, factors: Split) -> State:
        """Solve δ_t = terms_t + δ_{t+1} K_{t+1}, each part by itself."""
        return tuple(_scan(part, factor) for part, factor in zip(terms, factors.known, strict=True))

    def pull(self, direct: State, delta: State, factors: Split) -> State:
        """Return e_t + δ_{t+1} (F_{t+1} - K_{t+1}) for all t at once."""
        return tuple(map(_shifted_sum, direct, self.crossed(delta, factors)))

    @abstractmethod
    def crossed(self, delta: State, factors: Split) -> State:
        """Return δ_t (F_t - K_t) for t = 2..T."""


class CellChain(TimeChain):
    """A layer of one of torch's own cells.

    Args:
        mode: which cell, "RNN_TANH", "RNN_RELU", "GRU" or "LSTM".
        x: the layer's input, (T, B, I).
        out: h_1 to h_T, (T, B, H).
        first: h_0 and, for LSTM, c_0, (B, H).
        weights: W_ih, W_hh and, if the layer has them, b_ih, b_hh.
        wanted: whether the gradients of the input and of each weight are needed.
        memory: what is kept of the module's layers from pass to pass.
        name: of this layer and direction in ``memory``.
        gates: of a GRU, if they were kept; recomputed if not.
        inside: see :attr:`TimeChain.inside`.
    """

    def __init__(
        self,
        mode: str,
        x: Tensor,
        out: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        wanted: Sequence[bool],
        memory: dict[str, Tensor],
        name: str,
        gates: Gates | None = None,
        inside: Tensor | None = None,
    ):
        self.inside = inside
        super().__init__(len(x), out, memory, name)
        self.x, self.parameters, self.wanted = x, weights, wanted
        self.before = torch.cat([first[0].unsqueeze(0), out[:-1]])
        self.cell = linearise(mode, x, out, self.before, first, weights, gates)
        self.diagonal = self.cell.diagonal

    def scan(self, terms: State, factors: Split) -> State:
        """Solve δ_t = terms_t + δ_{t+1} K_{t+1}; no part crosses to h, so that δ of h comes first."""
        if factors.crossing:
            h = _scan(terms[0], factors.known[0])
            crossing = self.cell.crossing((h, *terms[1:]), _LATER)
            terms = tuple(_shifted_sum(e, times(c, factors.crossing)) for e, c in zip(terms, crossing, strict=True))
        return super().scan(terms, factors)

    def crossed(self, delta: State, factors: Split) -> State:
        """Return δ_t (F_t - K_t) for t = 2..T: one product with W_hh, the rest elementwise."""
        parts = [times(part, 1.0 - factors.crossing) for part in self.cell.crossing(delta, _LATER)]
        for n, (part, rest) in enumerate(zip(delta, factors.rest, strict=True)):
            parts[n] = plus(parts[n], times(_at(part, _LATER), _at(rest, _LATER)))
        parts[0] = plus(self.cell.hidden(delta, _LATER) @ self.parameters[1], parts[0])
        return tuple(parts)

    def backpropagate(self, direct: State) -> ChainGradients:
        """Return the exact gradients: δ step by step, everything else at once."""
        return self.gradients(self.cell.unroll(direct, self.parameters[1]))

    def gradients(self, delta: State) -> ChainGradients:
        """Return δ_t ∂f_t/∂θ summed over t, the inputs' gradients, and those of the initial state."""
        hidden = self.cell.hidden(delta)
        initial = list(self.cell.crossing(delta, _FIRST))
        for n, (part, diagonal) in enumerate(zip(delta, self.diagonal, strict=True)):
            initial[n] = plus(initial[n], times(_at(part, _FIRST), _at(diagonal, _FIRST)))
        initial[0] = plus(hidden[_FIRST] @ self.parameters[1], initial[0])
        of_x, of_w_ih, of_w_hh, *of_biases = self.wanted
        of_b_ih, of_b_hh = of_biases or (False, False)
        w_hh, b_hh = _summed(hidden, self.before, of_w_hh, of_b_hh)
        fed = self.cell.fed(delta, hidden)
        w_ih, b_ih = _summed(fed, self.x, of_w_ih, of_b_ih)
        inputs = [fed @ self.parameters[0] if of_x else None]
        parameters = [w_ih, w_hh, b_ih, b_hh][: len(self.parameters)]
        return ChainGradients(tuple(None if g is None else g[0] for g in initial), inputs, parameters)


def _summed(cotangent: Tensor, x: Tensor, of_weight: bool, of_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias of a linear map of ``x``, summed over steps and sequences."""
    flat = cotangent.flatten(0, 1)
    return flat.t() @ x.flatten(0, 1) if of_weight else None, flat.sum(0) if of_bias else None


_FIRST = slice(0, 1)
_LATER = slice(1, None)


def _at(x: Any, steps: slice) -> Any:
    """Return ``x`` at ``steps``; what is the same at all steps stays."""
    return x[steps] if isinstance(x, Tensor) and x.dim() == 3 else x


def _minus(a: Factor, b: Factor) -> Factor:
    return a if is_number(b, 0.0) else a - b


def _scan(terms: Tensor | None, factor: Factor) -> Tensor | None:
    if terms is None or is_number(factor, 0.0):
        return terms
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=torch.promote_types(terms.dtype, torch.float32), device=terms.device)
    return scan(terms, factor, reverse=True)


def _shifted_sum(direct: Tensor | None, crossed: Tensor | None) -> Tensor | None:
    """Return e_t + v_{t+1}."""
    if crossed is None:
        return direct
    if direct is None:
        return torch.cat([crossed, torch.zeros_like(crossed[:1])])
    return torch.cat([direct[:-1] + crossed, direct[-1:]])
