"""PEPITA, error-driven input modulation."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from gradfree.chains.chain import ChainGradients
from gradfree.engines.feedback import FeedbackEngine
from gradfree.layers.layer_chain import LayerChain, normalised, scaled

_SCALE = 0.05 * sqrt(2.0)
"""Of F, besides the Kaiming-uniform matrix: together 0.05 · U(±√(6/inputs)), as published."""


@dataclass(frozen=True, kw_only=True)
class PEPITA(FeedbackEngine):
    """PEPITA: no backward pass, the error enters at the input through a fixed random matrix F.

    Dellaferrera and Kreiman, "Error-driven input modulation", ICML 2022, arXiv 2201.11665: a second pass, with the
    same dropout masks, starts from x - F e, and the gradient of layer l is (h_l - h̃_l) h̃_{l-1}ᵀ, with h̃ of the
    second pass; of the last layer e h̃_{L-1}ᵀ. The paper adds F e and subtracts the update, which for a random F is
    the same; with this sign F should be like the product of the transposed weights, as in FOTON and in the improved
    version (Srinivasan et al., "Forward learning with top-down feedback", ICLR 2024, arXiv 2302.05440). The first
    published code takes the second pass's own error at the last layer of dense networks, ẽ h̃_{L-1}ᵀ, and the mean
    over positions in convolutions; here they sum, as in backpropagation.

    As in ``foton``, each sample's error is normalised for the second pass and its differences are scaled back, so
    that the gradients are linear in the loss; biases get the sum of h_l - h̃_l, and layers before the chain F e.

    The improved version's activation normalisation is not an option: it divides the activations of the forward pass,
    which an engine must leave as they are; in the gradients alone it would be a learning rate for each layer, and
    one that depends on the other samples of the batch. Normalise the inputs instead.

    Takes outputs (samples, classes).

    Args:
        seed: what F is drawn from.
    """

    @property
    def runs_again(self) -> bool:
        """Whether layers run once more: always, their gradients are taken at the second pass's inputs."""
        return True

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the differences between the two passes, times the second one's inputs, as gradients."""
        unit, norms = normalised(error)
        feedback = _SCALE * self.random_projection(chain, unit, 0)
        total = chain.zero()
        if chain.recording.goes_on:
            total = total._replace(initial=scaled(feedback, norms))
        compared = chain.compared(feedback, norms, second=True)
        del unit, feedback
        chain.add_compared(compared, error, total)
        return total
