"""Truncated backpropagation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_count
from gradfree.engines.sweeps import SweepEngine


@dataclass(frozen=True, kw_only=True)
class Truncated(SweepEngine):
    """Truncated backpropagation: each cotangent is followed through ``window`` links; K = 0.

    ``window=1`` trains every link on its own state's cotangent alone (fully truncated BPTT, FT-BPTT, in the DSF
    paper); ``window`` ≥ L is exact. The same numbers as ``fixed_point`` with ``window - 1`` iterations.

    Args:
        window: how many links a cotangent crosses, the one whose parameters it trains included.
    """

    worth_trying: ClassVar = ({"window": 2}, {"window": 8})
    window: int = 1

    def __post_init__(self) -> None:
        check_count(self, "window", least=1)

    @property
    def sharper(self) -> Truncated:
        """Twice the window."""
        return replace(self, window=2 * self.window)

    @property
    def sweeps(self) -> int:
        """Return ``window - 1``: the last link is crossed on the way to its parameters."""
        return self.window - 1

    def split(self, chain: Chain) -> Any:
        """Return K = 0."""
        return chain.constant(0.0)
