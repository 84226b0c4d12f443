"""Arithmetic of cotangents, and the reverse linear recurrence over the links of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Cotangent = Tensor | None
"""A gradient with respect to a state, of the state's shape; ``None`` is a zero that costs no computation."""

Factor = float | Tensor
"""A diagonal link Jacobian K: a number (a multiple of the identity) or a tensor that broadcasts to the state."""


def is_number(factor: Factor, number: float) -> bool:
    """Return whether ``factor`` is the Python number ``number``; never compares a tensor, which would cause a sync."""
    return not isinstance(factor, Tensor) and factor == number


def plus(a: Cotangent, b: Cotangent) -> Cotangent:
    """Return a + b."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def times(delta: Cotangent, factor: Factor) -> Cotangent:
    """Return the row vector ``delta`` times the diagonal ``factor``."""
    if isinstance(factor, Tensor):
        return None if delta is None else (delta * factor).to(delta.dtype)
    if delta is None or factor == 0.0:
        return None
    return delta if factor == 1.0 else delta * factor


def times_all(delta: Cotangent, factors: Sequence[Factor]) -> Cotangent:
    """Return ``delta`` times the diagonals of several consecutive links, the last link first."""
    for factor in reversed(factors):
        delta = times(delta, factor)
    return delta


def damped(before: Any, after: Any, rate: float) -> Any:
    """Return ``before`` + ``rate`` · (``after`` - ``before``), for tensors or for sequences of cotangents."""
    if isinstance(after, Tensor):
        return torch.lerp(before, after, rate)
    return type(after)(plus(times(b, 1.0 - rate), times(a, rate)) for b, a in zip(before, after, strict=True))


def relative_change(before: Tensor | Sequence[Cotangent], after: Tensor | Sequence[Cotangent]) -> Tensor:
    """Return ‖after - before‖ / ‖before‖, with all cotangents as one vector; NaN if ``before`` is zero."""
    olds, news = ([c] if isinstance(c, Tensor) else list(c) for c in (before, after))
    changes = [plus(new, None if old is None else -old) for old, new in zip(olds, news, strict=True)]
    return _norm(changes) / _norm(olds)


def _norm(cotangents: Sequence[Cotangent]) -> Tensor:
    found = [c for c in cotangents if c is not None]
    dtypes = [torch.promote_types(c.dtype, torch.float32) for c in found]
    return torch.stack([torch.linalg.vector_norm(c, dtype=d) for c, d in zip(found, dtypes, strict=True)]).norm()


def reverse_scan(terms: Sequence[Cotangent], factors: Sequence[Factor]) -> list[Cotangent]:
    """Solve δ_i = terms_i + δ_{i+1} K_{i+1} from the last state to the first.

    This is CumSumProd of Highway-BP (arXiv 2501.17086, eq. 12). The paper's Algorithm 1 has the factors one place
    off: δ_{i+1} is multiplied by K_{i+1}, the Jacobian of the link between states i and i + 1.

    Args:
        terms: one cotangent for each state, h_1 to h_L.
        factors: one factor for each link, K_1 to K_L. K_1, which leads to h_0, is not used.

    Returns:
        δ_1 to δ_L. Entries may share storage with each other and with ``terms``: do not write to them.
    """
    delta = list(terms)
    for i in range(len(delta) - 2, -1, -1):
        delta[i] = plus(delta[i], times(delta[i + 1], factors[i + 1]))
    return delta
