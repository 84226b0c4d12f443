"""Predictive coding with fixed predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_count, check_positive
from gradfree.engines.sweeps import SweepEngine


@dataclass(frozen=True, kw_only=True)
class PredictiveCoding(SweepEngine):
    """Predictive coding: k relaxations of all prediction errors at once, δ ← δ + η (e + δF - δ), from δ = e; K = 0.

    Whittington & Bogacz 2017, with the predictions fixed at the values of the forward pass as in Millidge et al.,
    "Predictive coding approximates backprop along arbitrary computation graphs", 2022, arXiv 2006.04182. With η = 1 it
    is ``fixed_point`` and exact once k reaches L - 1; Song et al. 2020 show this for zero-divergence inference
    learning. With η < 1 it converges to backpropagation: after k iterations, a cotangent that has crossed d links is
    weighted by the probability of at least d successes in k trials with probability η.

    Args:
        iterations: k, the number of iterations; with ``rate=1``, more than L - 1 change nothing and are not run.
        rate: η, above 0 and at most 1.

    Raises:
        TypeError: an option is not a number of the right type.
        ValueError: an option is out of range.
    """

    worth_trying: ClassVar = ()  # ``fixed_point`` comes closer at the same cost.
    iterations: int = 8
    rate: float = 0.5

    def __post_init__(self) -> None:
        check_count(self, "iterations", least=0)
        check_positive(self, "rate", most=1)

    @property
    def sharper(self) -> PredictiveCoding:
        """The engine with twice as many iterations."""
        return replace(self, iterations=max(1, 2 * self.iterations))

    @property
    def sweeps(self) -> int:
        """Return ``iterations``."""
        return self.iterations

    def split(self, chain: Chain) -> Any:
        """Return K = 0."""
        return chain.constant(0.0)
