"""The one idea in dense matrices: every engine solves δ_i = e_i + δ_{i+1} F_{i+1}, and differs in how.

Read this first. It computes whole Jacobians, one link after another: slow and plain. The engines are tested
against it. States and cotangents are flat, of B · N numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Link = Callable[[Tensor], Tensor]
"""One f_i(h; θ_i) of a chain."""


def states_of(links: Sequence[Link], first: Tensor) -> list[Tensor]:
    """Return h_0 = ``first``, h_1 = f_1(h_0), ..., h_L, each with a graph of its own link only."""
    found = [first.detach().requires_grad_()]
    for link in links:
        found.append(link(found[-1]).detach().requires_grad_())
    return found


def jacobians(links: Sequence[Link], states: Sequence[Tensor]) -> list[Tensor]:
    """Return F_1, ..., F_L: F_i = ∂h_i/∂h_{i-1}, a square matrix each."""
    return [
        torch.autograd.functional.jacobian(link, h.detach()).reshape(h.numel(), h.numel())
        for link, h in zip(links, states, strict=False)
    ]


def direct_cotangents(loss: Callable[[Sequence[Tensor]], Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """Return e_1, ..., e_L: the gradient of the loss with respect to each state itself, not through later ones."""
    leaves = [h.detach().requires_grad_() for h in states]
    found = torch.autograd.grad(loss(leaves), leaves[1:], allow_unused=True)
    return [torch.zeros_like(h).flatten() if e is None else e.flatten() for e, h in zip(found, leaves[1:], strict=True)]


def backward(e: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """Return the solution of δ_i = e_i + δ_{i+1} K_{i+1}, from the last link to the first.

    With K = F this is backpropagation. With a cheap K it is one scan.

    Args:
        e: of the links 1 to L.
        factors: K_1 to K_L; the first is not used.
    """
    delta = [e[-1]]
    for i in reversed(range(len(e) - 1)):
        delta.insert(0, e[i] + delta[0] @ factors[i + 1])
    return delta


def sweep(
    delta: Sequence[Tensor], e: Sequence[Tensor], jacobians: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Return one sweep δ ← scan(e + δ J, K) with the split F = K + J: all links at once, then one scan."""
    pulled = [d @ (f - k) for d, f, k in zip(delta[1:], jacobians[1:], kept[1:], strict=True)]
    return backward([a + p for a, p in zip(e, [*pulled, torch.zeros_like(e[-1])], strict=True)], kept)


def sweeps(
    e: Sequence[Tensor], jacobians: Sequence[Tensor], kept: Sequence[Tensor], count: int, rate: float = 1.0
) -> list[Tensor]:
    """Return δ after ``count`` sweeps from the scan along K.

    ===================== =============================== ===================
    engine                K                               sweeps
    ===================== =============================== ===================
    ``backprop``          F                               0
    ``fixed_point``       0                               k
    ``truncated``         0                               window - 1
    ``highway_bp``        (1 - γ) times the residual path k
    ``dsf``               one diagonal                    k, by default 0
    ``snap``              the diagonal of F               0
    ``newton``            the gate or the diagonal of F   until they settle
    ``predictive_coding`` 0; moves by ``rate`` only       k
    ===================== =============================== ===================
    """
    delta = backward(e, kept)
    for _ in range(count):
        moved = sweep(delta, e, jacobians, kept)
        delta = [d + rate * (m - d) for d, m in zip(delta, moved, strict=True)]
    return delta


def segmented(
    e: Sequence[Tensor], jacobians: Sequence[Tensor], kept: Sequence[Tensor], ends: Sequence[int], count: int
) -> list[Tensor]:
    """Return δ after ``count`` sweeps over segments: a chain of segments, each a link whose F is exact.

    One segment is ``backprop``, L segments are :func:`sweeps`; between them lie ``highway_bp(segments=C)`` and
    ``shooting``, which has K = 0 and sweeps until the borders settle.

    Args:
        e: of the links 1 to L.
        jacobians: F_1 to F_L.
        kept: K_1 to K_L.
        ends: the index, from 0, of the last link of each segment.
        count: the number of sweeps.
    """
    parts = [slice(before + 1, end + 1) for before, end in zip([-1, *ends[:-1]], ends, strict=True)]
    across = [[product(factors[part]) for part in parts] for factors in (jacobians, kept)]
    own = [e[end].clone() for end in ends]
    for c, part in enumerate(parts[1:]):
        # What the states inside the next segment send to this one's end, whatever enters there.
        inside = backward([*e[part][:-1], torch.zeros_like(e[0])], jacobians[part])
        own[c] += inside[0] @ jacobians[part.start]
    guess = backward(e, kept)
    borders = [guess[end] for end in ends]
    for _ in range(count):
        borders = sweep(borders, own, *across)
    found: list[Tensor] = []
    for part, border in zip(parts, borders, strict=True):
        found += backward([*e[part][:-1], border], jacobians[part])
    return found


def product(factors: Sequence[Tensor]) -> Tensor:
    """Return F_n ··· F_1, which carries a row vector from the last link to before the first."""
    return factors[0] if len(factors) == 1 else torch.linalg.multi_dot(list(reversed(factors)))


def parameter_gradients(
    links: Sequence[Link], states: Sequence[Tensor], delta: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Return Σ_i δ_i ∂f_i/∂θ: exact and local given δ, the same for all engines."""
    total = [torch.zeros_like(p) for p in parameters]
    for link, h, d in zip(links, states, delta, strict=False):
        out = link(h.detach())
        found = torch.autograd.grad(out, parameters, d.view_as(out), allow_unused=True)
        total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
    return total
