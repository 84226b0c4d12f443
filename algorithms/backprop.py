"""Standard backpropagation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradfree.attaching import Handle
from gradfree.chain import Chain, ChainGradients
from gradfree.engine import Engine
from gradfree.validation import Report


@dataclass(frozen=True, kw_only=True)
class Backprop(Engine):
    """Exact backpropagation, link by link through the chain; ``plain=True`` leaves autograd alone.

    Args:
        plain: attach nothing at all: the model trains as it would without gradfree, chains or not.
    """

    plain: bool = False

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients."""
        return chain.backpropagate(direct)

    def validate(self, model: nn.Module, chains: Sequence[str] | None = None) -> Report:
        """Tell whether the engine can be attached; with ``plain`` it always can."""
        return Report() if self.plain else super().validate(model, chains)

    def attach(self, model: nn.Module, chains: Sequence[str] | None = None, *, lean: bool = False) -> Handle:
        """Attach to the chains, or with ``plain`` to nothing."""
        return Handle() if self.plain else super().attach(model, chains, lean=lean)
