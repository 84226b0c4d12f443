"""Backpropagation with weights that are kept orthogonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.layers.layer_chain import LayerChain
from gradfree.orthogonal.orthogonal_engine import OrthogonalEngine


@dataclass(frozen=True, kw_only=True)
class OrthogonalBackprop(OrthogonalEngine):
    """Exact backpropagation on the chains of ``foton``, with weights kept orthogonal.

    By default two Newton-Schulz steps follow each optimizer step, which keep ‖W Wᵀ - I‖ near or below 1e-3 at usual
    learning rates. With ``orthogonalize_every=None, orthogonalize_steps=1`` weights are as orthogonal as those of
    ``foton``: a baseline that separates FOTON's gradients (arXiv 2512.20668) from its constraint on the weights. Its
    distance to ``backprop`` is the cost of the constraint; the distance of ``foton`` to it is the cost of inexact
    gradients.

    Its options are those of :class:`~gradfree.orthogonal.orthogonal_engine.OrthogonalEngine`. As in ``foton``, the
    error does not contain the factor ``temperature``.
    """

    orthogonalize_every: int | None = 1
    orthogonalize_steps: int = 2

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients, for the error without the temperature."""
        assert isinstance(chain, LayerChain)
        return chain.backpropagate(self.without_temperature(chain, direct))
