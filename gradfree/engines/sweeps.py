"""Engines that solve a chain by sweeps: a split F = K + J, scans along K and pulls through J."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from gradfree.algebra.cotangents import relative_change
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.engines.engine import Engine


class SweepEngine(Engine):
    """An engine that splits each link's Jacobian into F = K + J and iterates δ ← scan(e + pull_J(δ), K).

    With diagonal K the scan is cheap; each sweep pulls through all links at once. After k sweeps δ is exact for
    the last k + 1 states, so k = L - 1 is exact everywhere (Highway-BP, arXiv 2501.17086, eqs. 6 and 7).
    """

    @property
    @abstractmethod
    def sweeps(self) -> int:
        """Return k, the number of sweeps after the first scan."""

    @abstractmethod
    def split(self, chain: Chain) -> Any:
        """Return the factors K_i, made by ``chain.constant`` or ``chain.residual``."""

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients after :attr:`sweeps` sweeps."""
        factors = self.split(chain)
        delta = chain.scan(direct, factors)
        sweeps = min(self.sweeps, len(chain) - 1)

        def swept() -> Any:
            return chain.scan(chain.pull(direct, delta, factors), factors)

        for _ in range(sweeps):
            delta = swept()
        chain.offer("sweeps", lambda: torch.tensor(float(sweeps)))
        chain.offer("residual", lambda: relative_change(delta, swept()))
        return chain.gradients(delta)
