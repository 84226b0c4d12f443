"""Forward gradients: directional derivatives in random directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.site import Site
from gradfree.engines.draws import new_generator, normal
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_positive


@dataclass(frozen=True, kw_only=True)
class ForwardGradient(Engine):
    """Forward gradients: the loss's derivative in a random direction, times that direction, with states perturbed.

    Baydin et al., "Gradients without backpropagation", 2022, arXiv 2202.08587, with perturbed states in place of
    weights (Ren et al., "Scaling forward gradient with local losses", 2023, arXiv 2210.03310). For each sample, random
    tangents v_i of all states are pushed forward from the first link to the last: w_j = F_j (w_{j-1} + v_{j-1}). Then
    δ_i = e_i + v_i Σ_{j>i} e_j·w_j / σ², which is unbiased. The published δ_i = v_i Σ_j e_j·u_j / σ², u_j = w_j + v_j,
    has a larger variance: it also estimates e_i, which is known, and adds terms of mean zero from states before i.

    The error grows roughly as the root of the number of units. The directions depend on ``seed``, the chain, the rank,
    the type of device and the number of earlier passes, which checkpoints contain: they are new in each pass.

    Args:
        samples: the number of directions that are averaged.
        sigma: σ, the standard deviation of v. JVPs are exact, so it cancels; it only matters for overflow in float16.
        seed: of the random directions.
    """

    worth_trying: ClassVar = ()
    is_random: ClassVar = True
    samples: int = 1
    sigma: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self, "samples", least=1)
        check_positive(self, "sigma")
        check_count(self, "seed", least=0)

    @property
    def sharper(self) -> ForwardGradient:
        """The engine with four times as many directions, which halves the error."""
        return replace(self, samples=4 * self.samples)

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is one of chains in depth."""
        return kind.dimension == "depth" and super().solves(kind)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients for the estimated δ."""
        known = chain.vectors(direct)
        # New in each pass.
        generator = new_generator(chain, "forward_gradient", self.seed, known.device)
        directions = self.sigma * normal(generator, (self.samples, *known.shape), known)
        # Complex numbers count as two real ones.
        slopes = torch.einsum("lbh,nlbh->nlb", known.conj(), chain.jvps(directions)).real
        later = slopes.flip(1).cumsum(1).flip(1) - slopes
        estimated = torch.einsum("nlb,nlbh->lbh", later.to(directions), directions) / (self.samples * self.sigma**2)
        return chain.gradients(chain.cotangents(known + estimated, direct))
