"""Forward gradients: directional derivatives in random directions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.site import Site
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_positive


@dataclass(frozen=True, kw_only=True)
class ForwardGradient(Engine):
    """Forward gradients, activity-perturbed: the loss's derivative in a random direction, times that direction.

    Baydin et al., "Gradients without backpropagation", 2022, arXiv 2202.08587, with every state perturbed in place of
    the weights (Ren et al., "Scaling forward gradient with local losses", 2023, arXiv 2210.03310). Of each sample,
    random v_i of all states travel as tangents from the first link to the last, and w_j = F_j (w_{j-1} + v_{j-1})
    reach the others: δ_i = e_i + v_i Σ_{j>i} e_j·w_j / σ², unbiased. The printed δ_i = v_i Σ_j e_j·u_j / σ², with
    u_j = w_j + v_j, also draws e_i, which is known, and what earlier states cannot tell of v_i: zero in the mean.

    The error grows with the number of units, about as its root. The directions depend on ``seed``, the chain, the rank
    and the number of passes before, which checkpoints keep: no two passes have the same, nor have two devices.

    Args:
        samples: directions that are averaged.
        sigma: σ, the standard deviation of v. Derivatives are exact, so that it cancels, but for overflow in float16.
        seed: what the directions are drawn from.

    """

    worth_trying: ClassVar = ()
    samples: int = 1
    sigma: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self, "samples", least=1)
        check_positive(self, "sigma")
        check_count(self, "seed", least=0)

    @property
    def is_random(self) -> bool:
        """Always."""
        return True

    @property
    def sharper(self) -> ForwardGradient:
        """Four times as many directions, which halve the error."""
        return replace(self, samples=4 * self.samples)

    def solves(self, kind: type[Site]) -> bool:
        """Tell whether ``kind`` is one of chains in depth."""
        return kind.dimension == "depth" and super().solves(kind)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients for δ as the directions tell it."""
        known = chain.vectors(direct)
        directions = self.sigma * self._drawn(chain, known)
        slopes = torch.einsum("lbh,nlbh->nlb", known, chain.jvps(directions))
        later = slopes.flip(1).cumsum(1).flip(1) - slopes
        told = torch.einsum("nlb,nlbh->lbh", later, directions) / (self.samples * self.sigma**2)
        return chain.gradients(chain.cotangents(known + told, direct))

    def _drawn(self, chain: Chain, like: Tensor) -> Tensor:
        """Return (samples, L, B, H) standard normal numbers, others in each pass."""
        kept = chain.memory.of("forward_gradient")
        # By numpy: to read a tensor on the CPU waits for no device.
        passes = int(kept["passes"].cpu().numpy()) + 1 if kept else 1
        kept["passes"] = torch.tensor(passes, device="cpu")
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        seed = zlib.crc32(f"{self.seed} {chain.path} {rank} {passes}".encode())
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn((self.samples, *like.shape), generator=generator, device=like.device).to(like)
