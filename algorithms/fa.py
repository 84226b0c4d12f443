"""Feedback alignment."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradfree.chains.chain import ChainGradients
from gradfree.engines.feedback import FeedbackEngine
from gradfree.layers.layer_chain import LayerChain
from gradfree.layers.roles import Role, adjoint, role_of, weight_of


@dataclass(frozen=True, kw_only=True)
class FA(FeedbackEngine):
    """Feedback alignment: backpropagation with fixed random weights in place of the transposed ones.

    Lillicrap et al., "Random synaptic feedback weights support error backpropagation for deep learning", Nature
    Communications 7, 2016 (arXiv 1411.0247): δ_l = (B_{l+1} δ_{l+1}) ⊙ f'(a_l). B_l is shaped like W_l, convolutions
    included, and used as W_l is in the backward pass; activations, dropout and pools are differentiated exactly.
    Layers before the chain get B_1 δ_1. The paper chooses the scale of B_l for each task; see
    :class:`~gradfree.engines.feedback.FeedbackEngine`.

    Args:
        seed: what the matrices are drawn from.
    """

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients, layer by layer from the last to the first."""
        total = chain.zero()
        delta = error
        for i in range(chain.last, -1, -1):
            link = chain.links[i]
            if role_of(link.block) is not Role.WEIGHTS:
                delta = chain.pulled(link, delta)
                chain.walked(i)
                continue
            chain.add(link, delta, total)
            chain.walked(i)
            if link.state is None:
                return total
            matrix = self.matrix(chain.memory, link.path, weight_of(link.block).shape, delta)
            delta = adjoint(link.block, delta, chain.shape(i), matrix)
        return total._replace(initial=delta)
