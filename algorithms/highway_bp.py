"""Highway backpropagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_number
from gradfree.engines.sweeps import IteratedEngine


@dataclass(frozen=True, kw_only=True)
class HighwayBP(IteratedEngine):
    """Highway-BP: gradients travel the whole residual path in one scan and cross k blocks by k sweeps.

    Fagnou et al., "Accelerated training through iterative gradient propagation along the residual path", ICLR
    2025, arXiv 2501.17086, eqs. 6 to 11. K is the diagonal that each block's skip connection carries: I for
    x + g(x), the ReLU mask for ReLU(x + g(x)), the scale α/σ for LN(x + g(x)), all times (1 - γ). Exact for the
    last k + 1 blocks at every k, everywhere at k = L.

    Two things differ from the printed algorithm, on purpose: its scan's initial P_i = K_i must read K_{i+1}; and
    what lies before the chain gets δ_1 F_1, one exact pull that costs nothing extra, instead of the iterate.

    Args:
        iterations: k, the number of sweeps; 2 if neither it nor ``tolerance`` is given.
        tolerance: in place of ``iterations``: sweep until what a sweep changes in the cotangents is this small,
            relative to them, L - 1 times at most. Waits for the device once a sweep.
        segments: C, for chains in depth: exact inside each of C segments, K across their borders; then C - 1 sweeps are
            exact, and far fewer are close. One is backpropagation, L the engine without.
        gamma: γ in [0, 1], the share of the residual path that is left to the sweeps. 0 is the plain split, 1 the
            fixed-point iteration; the authors use 0.2 for pre-LN and 0.8 for post-LN transformers, without
            which theirs diverged.
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
        """Whether γ leaves anything of the residual path to K."""
        return self.gamma < 1.0

    def split(self, chain: Chain) -> Any:
        """Return K = (1 - γ) times the residual path's diagonal."""
        return chain.residual(1.0 - self.gamma)
