"""Fixed-point iteration on the cotangents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_count
from gradfree.engines.sweeps import SweepEngine


@dataclass(frozen=True, kw_only=True)
class FixedPoint(SweepEngine):
    """Fixed-point iteration δ ← e + δF: all links at once, k times; K = 0.

    The baseline of Highway-BP (arXiv 2501.17086, section 4.2, after Wang & Ragni 2021) and its case γ = 1.
    A cotangent crosses at most k + 1 links; the gradients are exact once k reaches L - 1.

    Args:
        iterations: k, the number of sweeps.
    """

    iterations: int = 2

    def __post_init__(self) -> None:
        check_count(self, "iterations", least=0)

    @property
    def sweeps(self) -> int:
        """Return ``iterations``."""
        return self.iterations

    def split(self, chain: Chain) -> Any:
        """Return K = 0."""
        return chain.constant(0.0)
