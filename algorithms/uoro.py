"""Unbiased online recurrent optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradfree.chains.chain import ChainGradients
from gradfree.engines.draws import new_generator
from gradfree.engines.online import StreamEngine
from gradfree.engines.options import check_count
from gradfree.time.closed_forms import State
from gradfree.time.time_chain import TimeChain

_TINY = 1e-7


@dataclass(frozen=True, kw_only=True)
class UORO(StreamEngine):
    """UORO: the influence of the parameters on the state as one random product s θ of rank one, which is unbiased.

    Tallec and Ollivier, "Unbiased online recurrent optimization", ICLR 2018, arXiv 1702.05043, algorithm 1. With random
    signs ν, new at each step, s ← ρ₀ F_t s + ρ₁ ν and θ ← θ / ρ₀ + ν ∂f_t/∂θ / ρ₁; the gradient is Σ (e_t · s_t) θ_t,
    for each sequence by itself. ρ₀ and ρ₁ give both sides of each product one norm. Nothing goes backwards: modules
    before the layer get e_t through the present step only. The signs depend on ``seed``, the chain, the rank, the type
    of device and the number of earlier passes, which checkpoints contain.

    Needs nothing but a recurrent layer. Costs T steps in Python, and the memory of the weights for each sequence.

    Args:
        seed: of the random signs.
        stream: see :class:`~gradfree.engines.online.StreamEngine`.
    """

    is_random: ClassVar = True
    worth_trying: ClassVar = ()
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "seed", least=0)

    def chunk_gradients(self, chain: TimeChain, direct: State) -> ChainGradients:
        """Return the gradients of the parameters, step by step from the first."""
        links, known, e = chain.repeated_links(1), self.carried(chain), chain.vectors(direct)
        generator = new_generator(chain, f"uoro {chain.path}", self.seed, e.device)
        signs = torch.randint(2, e.shape, generator=generator, device=e.device).to(e) * 2 - 1
        s, theta = known.get("s", torch.zeros_like(e[0])), known.get("theta", e.new_zeros(e.shape[1], 1))
        total = e.new_zeros(1)
        for t, nu in enumerate(signs):
            found = chain.sample_gradients(chain.cotangents(nu[None], direct), slice(t, t + 1))
            local = torch.cat([_rows(g, p, e) for g, p in zip(found, chain.parameters, strict=True)], 1)
            of_state = links.jvp([part[0] for part in chain.cotangents(s[None], direct)], t)
            s = torch.cat([part.flatten(1).to(e) for part in of_state], 1)
            rho_0, rho_1 = _root_of_ratio(theta, s), _root_of_ratio(local, nu)
            s, theta = rho_0 * s + rho_1 * nu, theta / rho_0 + local / rho_1
            total = total + (e[t] * s).sum(1) @ theta
        self.carry(chain, {"s": s, "theta": theta})
        gradients = chain.gradients(direct)
        split = total.split([p.numel() for p in chain.parameters])
        own = zip(gradients.parameters, split, strict=True)
        return gradients._replace(parameters=[None if g is None else part.view_as(g).to(g) for g, part in own])


def _rows(g: Tensor | None, parameter: Tensor, like: Tensor) -> Tensor:
    """Return ``g``, (B, 1, ...), as (B, N); zeros for a frozen parameter, which may be trained in a later chunk."""
    return like.new_zeros(like.shape[1], parameter.numel()) if g is None else g.flatten(1).to(like)


def _root_of_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return √(‖a‖ / ‖b‖) of each sequence, (B, 1), a small number added to both norms: s and θ begin at zero."""
    return ((a.norm(dim=1, keepdim=True) + _TINY) / (b.norm(dim=1, keepdim=True) + _TINY)).sqrt()
