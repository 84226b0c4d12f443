"""Highway backpropagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_number
from gradfree.engines.sweeps import IteratedEngine


@dataclass(frozen=True, kw_only=True)
class HighwayBP(IteratedEngine):
    """Highway-BP: one scan carries gradients along the whole residual path; k sweeps add the VJPs of k blocks.

    Fagnou et al., "Accelerated training through iterative gradient propagation along the residual path", ICLR
    2025, arXiv 2501.17086, eqs. 6 to 11. K is the diagonal that each block's skip connection carries: I for
    x + g(x), the ReLU mask for ReLU(x + g(x)), the scale α/σ for LN(x + g(x)), all times (1 - γ). Exact for the
    last k + 1 blocks at every k, everywhere at k = L - 1.

    Two things differ from the printed algorithm on purpose. Its scan starts from P_i = K_i, which must read K_{i+1}.
    The input of the chain gets δ_1 F_1, one exact VJP at no extra cost, instead of the iterate.

    Args:
        iterations: k, the number of sweeps; 2 if neither it nor ``tolerance`` is given.
        tolerance: in place of ``iterations``: sweep until a sweep changes the cotangents by at most this, relative to
            their norm; at most L - 1 sweeps. Waits for the device once a sweep.
        segments: C, for chains in depth: exact inside each of C segments, K across their borders. C - 1 sweeps are
            exact, and far fewer are close. 1 is backpropagation, L the same as ``None``.
        gamma: γ in [0, 1], the fraction of the residual path that is left to the sweeps. With 0, K is the whole
            residual path; 1 is the fixed-point iteration. The authors use 0.2 for pre-LN and 0.8 for post-LN
            transformers, since theirs diverged otherwise.
    """

    worth_trying: ClassVar = ({"iterations": 0}, {"iterations": 1}, {"iterations": 2}, {"iterations": 4})
    gamma: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "gamma", "a number from 0 to 1")
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"HighwayBP: gamma must be from 0 to 1, not {self.gamma}.")

    @property
    def needs_residual(self) -> bool:
        """Whether K is not zero: γ < 1."""
        return self.gamma < 1.0

    def split(self, chain: Chain) -> Any:
        """Return K = (1 - γ) times the residual path's diagonal."""
        return chain.residual(1.0 - self.gamma)
