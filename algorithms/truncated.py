"""Truncated backpropagation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradfree.chains.chain import Chain
from gradfree.engines.options import check_count
from gradfree.engines.sweeps import SweepEngine


@dataclass(frozen=True, kw_only=True)
class Truncated(SweepEngine):
    """Truncated backpropagation: each direct cotangent passes through at most ``window`` links; K = 0.

    ``window=1`` trains every link by the direct cotangent of its own output only (fully truncated BPTT, FT-BPTT, in
    the DSF paper); ``window`` ≥ L is exact. The same numbers as ``fixed_point`` with ``window - 1`` iterations.

    Args:
        window: the number of links, including the one whose parameters are trained.
    """

    worth_trying: ClassVar = ({"window": 2}, {"window": 8})
    window: int = 1

    def __post_init__(self) -> None:
        check_count(self, "window", least=1)

    @property
    def sharper(self) -> Truncated:
        """The engine with twice the window."""
        return replace(self, window=2 * self.window)

    @property
    def sweeps(self) -> int:
        """Return ``window - 1``: the parameter gradients count as the last link of the window."""
        return self.window - 1

    def split(self, chain: Chain) -> Any:
        """Return K = 0."""
        return chain.constant(0.0)
