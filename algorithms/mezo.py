"""Zeroth-order optimization: two evaluations of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.site import Site
from gradfree.engines.draws import new_generator, normal
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_positive


@dataclass(frozen=True, kw_only=True)
class MeZO(Engine):
    """MeZO: the slope of the loss itself along random directions z of the parameters, (ℓ(θ + εz) - ℓ(θ - εz)) / 2ε · z.

    Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient approximation", 1992
    (SPSA); Malladi et al., "Fine-tuning language models with just forward passes", 2023, arXiv 2305.17333, definition
    1, with normal z. Unbiased up to a term in ε². The error grows as the root of the number of parameters.

    Each chain's parameters are perturbed by themselves. Modules before and behind the chain get exact gradients, so
    this saves no memory: it shows how the rule learns. Both evaluations use the same random numbers, and leave weights
    (bitwise), buffers and random states as they were.

    Needs the loss, as a function that runs the model. Costs two more forward passes for each direction and chain, and
    a backward pass.

    Args:
        samples: the number of directions that are averaged.
        epsilon: ε, the length of a perturbation of one parameter.
        seed: of the random directions.
    """

    is_random: ClassVar = True
    worth_trying: ClassVar = ()
    needs: ClassVar[Sequence[str]] = ("loss",)
    samples: int = 1
    epsilon: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self, "samples", least=1)
        check_positive(self, "epsilon")
        check_count(self, "seed", least=0)

    @property
    def sharper(self) -> MeZO:
        """The engine with four times as many directions, which halves the error."""
        return replace(self, samples=4 * self.samples)

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem for weights that are computed from others in each pass."""
        yield from super().problems_with(site)
        for path, block in site.blocks.items():
            if any(map(is_parametrized, block.modules())):
                yield f"{path} has a parametrization: MeZO changes weights, which are computed here. Use plain weights."

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the estimates for the parameters, and exact gradients for everything else."""
        exact, device = chain.backpropagate(direct), chain.like.device
        # Through .data: autograd would count a change against the graph that waits for its backward.
        own = [p.data for p, g in zip(chain.parameters, exact.parameters, strict=True) if g is not None]
        generator = new_generator(chain, f"mezo {chain.path}", self.seed, device)
        total = [torch.zeros_like(p) for p in own]
        for _ in range(self.samples):
            z = [normal(generator, p.shape, p) for p in own]
            above, below = (_loss_at(chain, own, z, length) for length in (self.epsilon, -self.epsilon))
            slope = (above - below) / (2 * self.epsilon * self.samples)
            total = [g + v * slope.to(v) for g, v in zip(total, z, strict=True)]
        estimates = iter(total)
        return exact._replace(parameters=[None if g is None else next(estimates) for g in exact.parameters])


def _loss_at(chain: Chain, own: Sequence[Tensor], z: Sequence[Tensor], length: float) -> Tensor:
    """Return the loss at θ + length · z, with θ the parameters ``own``, which are bitwise the same afterwards."""
    before = [p.clone() for p in own]
    try:
        for p, v in zip(own, z, strict=True):
            p.add_(v, alpha=length)
        return chain.lesson.evaluate(chain.like.device)
    finally:
        for p, old in zip(own, before, strict=True):
            p.copy_(old)
