"""Predictive coding with fixed predictions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_count, check_positive
from gradfree.engines.sweeps import SweepEngine


@dataclass(frozen=True, kw_only=True)
class PredictiveCoding(SweepEngine):
    """Predictive coding: all prediction errors relax at once, k times: δ ← δ + η (e + δF - δ), from δ = e; K = 0.

    Whittington & Bogacz 2017, with the predictions fixed at the values of the forward pass as in Millidge et al.,
    "Predictive coding approximates backprop along arbitrary computation graphs", 2022, arXiv 2006.04182. With η = 1 it
    is ``fixed_point``, and exact once k reaches L - 1, which Song et al. 2020 show of zero-divergence inference
    learning. With η < 1 it converges to backpropagation: after k iterations, what has come over d links counts by the
    probability of d or more successes in k trials with probability η.

    Args:
        iterations: k, the number of iterations; with ``rate=1``, more than L - 1 change nothing and are not run.
        rate: η, above 0 and at most 1.

    Raises:
        TypeError: no ``int``, or no number.
        ValueError: out of range.
    """

    worth_trying: ClassVar = ()  # ``fixed_point`` comes closer at the same cost.
    iterations: int = 8
    rate: float = 0.5

    def __post_init__(self) -> None:
        check_count(self, "iterations", least=0)
        check_positive(self, "rate")
        if self.rate > 1:
            raise ValueError(f"PredictiveCoding: rate must be at most 1, not {self.rate}.")

    @property
    def sharper(self) -> PredictiveCoding:
        """Twice as many iterations."""
        return replace(self, iterations=max(1, 2 * self.iterations))

    @property
    def sweeps(self) -> int:
        """Return ``iterations``."""
        return self.iterations

    def split(self, chain: Chain) -> Any:
        """Return K = 0."""
        return chain.constant(0.0)
