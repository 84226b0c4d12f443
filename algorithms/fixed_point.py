"""Fixed-point iteration on the cotangents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradfree.chains.chain import Chain
from gradfree.engines.sweeps import IteratedEngine


@dataclass(frozen=True, kw_only=True)
class FixedPoint(IteratedEngine):
    """Fixed-point iteration δ ← e + δF: all links at once, k times; K = 0.

    The baseline of Highway-BP (arXiv 2501.17086, section 4.2, after Wang & Ragni 2021) and its case γ = 1.
    A cotangent crosses at most k + 1 links; the gradients are exact once k reaches L - 1.

    Args:
        iterations: k, the number of sweeps; 2 if neither it nor ``tolerance`` is given.
        tolerance: in place of ``iterations``: sweep until a sweep changes the cotangents by at most this, relative to
            their norm; at most L - 1 sweeps. Waits for the device once a sweep.
        segments: C, for chains in depth: exact inside each of C segments, K across their borders. C - 1 sweeps are
            exact, and far fewer are close. 1 is backpropagation, L the same as ``None``.
    """

    def split(self, chain: Chain) -> Any:
        """Return K = 0."""
        return chain.constant(0.0)
