"""Engines that solve a chain by sweeps: a split F = K + J, scans along K and VJPs through J."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradfree.algebra.cotangents import damped, relative_change
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.report import path_name
from gradfree.chains.site import Site
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_positive, whole_number
from gradfree.engines.rank_segment import Neighbors, rank_gradients
from gradfree.engines.segmented import Segments
from gradfree.wording import one


class SweepEngine(Engine):
    """An engine that splits each link's Jacobian into F = K + J and iterates δ ← scan(e + pull_J(δ), K).

    With diagonal K the scan is cheap; each sweep computes the VJPs of all links at once. After k sweeps δ is exact
    for the last k + 1 states, so k = L - 1 is exact everywhere (Highway-BP, arXiv 2501.17086, eqs. 6 and 7), unless
    :attr:`rate` damps the sweeps.
    """

    @property
    def pulls_at_once(self) -> bool:
        """Whether there are no segments: inside a segment, VJPs run one after another."""
        return self.segments is None

    @property
    @abstractmethod
    def sweeps(self) -> int:
        """Return k, the number of sweeps after the first scan; for a chain of L links at most L - 1 are run."""

    @property
    def tolerance(self) -> float | None:
        """Stop when a sweep changes δ by at most this, relative to δ; ``None``: always run :attr:`sweeps` sweeps."""
        return None

    @property
    def rate(self) -> float:
        """η: δ moves by this fraction of each sweep's change; below 1 no number of sweeps is exact."""
        return 1.0

    @property
    def segments(self) -> int | None:
        """The number of segments, inside which gradients are exact; ``None``: each link is a segment."""
        return None

    @abstractmethod
    def split(self, chain: Chain) -> Any:
        """Return the factors K_i, made by ``chain.constant`` or ``chain.residual``."""

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients after :attr:`sweeps` sweeps, or after as many as :attr:`tolerance` needs.

        Raises:
            TypeError: :meth:`split` did not return one factor for each link.
        """
        tolerance = self.tolerance
        factors, expected = self.split(chain), chain.constant(0.0)
        if type(factors) is not type(expected) or len(factors) != len(expected):
            got = one(type(factors).__name__) + (f" of {len(factors)}" if isinstance(factors, list | tuple) else "")
            raise TypeError(
                f"{type(self).__name__}.split must return what chain.constant or chain.residual returns, "
                f"{one(type(expected).__name__)} of {len(expected)}, one factor for each of the links (in time: of the "
                f"state's parts), not {got}."
            )
        count = self.segments
        system = _Links(chain, direct, factors) if count is None else Segments(chain, direct, factors, count)
        delta = system.first()
        change: torch.Tensor | None = None
        sweeps, most = 0, whole_number(self, "sweeps", least=0)
        if self.rate == 1.0:
            most = min(most, len(system) - 1)
        # Written so that a NaN change ends the loop.
        while sweeps < most and (tolerance is None or change is None or bool(change > tolerance)):
            before, delta = delta, system.sweep(delta)
            delta = delta if self.rate == 1.0 else damped(before, delta, self.rate)
            change = None if tolerance is None else relative_change(before, delta)
            sweeps += 1
        chain.offer("sweeps", lambda: torch.tensor(float(sweeps)))
        chain.offer("residual", lambda: relative_change(delta, system.sweep(delta)) if change is None else change)
        return system.gradients(delta)


class _Links:
    """All links of a chain, iterated in parallel with the engine's K."""

    def __init__(self, chain: Chain, direct: Any, factors: Any):
        self._chain, self._direct, self._factors = chain, direct, factors
        self._exact = 1

    def __len__(self) -> int:
        return len(self._chain)

    def first(self) -> Any:
        return self._chain.scan(self._direct, self._factors)

    def sweep(self, delta: Any) -> Any:
        factors = self._chain.sweep_factors(self._factors, self._exact)
        self._exact += 1
        return self._chain.scan(self._chain.pull(self._direct, delta, factors), factors)

    def gradients(self, delta: Any) -> ChainGradients:
        return self._chain.gradients(delta)


@dataclass(frozen=True, kw_only=True)
class IteratedEngine(SweepEngine):
    """A sweep engine whose user chooses the number of sweeps, or a tolerance that ends them.

    Args:
        iterations: k, the number of sweeps; 2 if neither ``iterations`` nor ``tolerance`` is given.
        tolerance: in place of ``iterations``: sweep until a sweep changes δ by at most this, relative to δ, all states
            together; at most L - 1 sweeps. Waits for the device once a sweep.
        segments: C, for chains in depth: exact inside each of C segments, solved side by side, K across their borders.
            1 is backpropagation, L the same as ``None``; C - 1 sweeps are exact.

    Raises:
        TypeError: an option is not a number of the right type.
        ValueError: an option is too small, or ``iterations`` and ``tolerance`` are both given.
    """

    worth_trying: ClassVar[Sequence[Mapping[str, Any]]] = ({"iterations": 1}, {"iterations": 2}, {"iterations": 4})
    iterations: int | None = None
    tolerance: float | None = None
    segments: int | None = None

    def __post_init__(self) -> None:
        if self.segments is not None:
            check_count(self, "segments", least=1)
        if self.tolerance is None:
            object.__setattr__(self, "iterations", 2 if self.iterations is None else self.iterations)
            check_count(self, "iterations", least=0)
        elif self.iterations is None:
            check_positive(self, "tolerance")
        else:
            name = type(self).__name__
            raise ValueError(f"{name}: iterations={self.iterations} and tolerance={self.tolerance}; give one of them.")

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem for a chain in time, if ``segments`` is given."""
        yield from super().problems_with(site)
        if self.segments is not None and site.dimension == "time":
            yield (
                f"{path_name(site.path)} is a chain in time: segments are for chains in depth. Use the engine "
                "'shooting', which has segments for recurrent layers, or leave the chain out: chains=[...]."
            )

    def problems_on_ranks(self, count: int) -> Iterator[str]:
        """Yield a problem for each option that does not work with ``count`` ranks, each of which is a segment."""
        if self.tolerance is not None:
            yield f"{self}: tolerance does not work across ranks; give iterations instead."
        if self.segments not in (None, count):
            yield f"{self}: across ranks each rank is a segment, {count} here; leave segments out."

    def gradients_on_ranks(self, chain: Chain, direct: Any, neighbors: Neighbors) -> ChainGradients:
        """Return the gradients with one segment a rank: the same as in one process with as many ``segments``."""
        sweeps = min(self.sweeps, neighbors.count - 1)
        chain.offer("sweeps", lambda: torch.tensor(float(sweeps)))
        if sweeps == neighbors.count - 1:
            return rank_gradients(chain, direct, neighbors)
        return rank_gradients(chain, direct, neighbors, self.split(chain), sweeps)

    @property
    def sharper(self) -> Engine:
        """The engine with twice as many sweeps, or a tenth of the tolerance."""
        if self.tolerance is not None:
            return replace(self, tolerance=self.tolerance / 10)
        return replace(self, iterations=max(1, 2 * self.sweeps))

    @property
    def sweeps(self) -> int:
        """Return ``iterations``, or a number that no chain reaches."""
        return sys.maxsize if self.iterations is None else self.iterations
