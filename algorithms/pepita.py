"""PEPITA, error-driven input modulation."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from gradfree.chains.chain import ChainGradients
from gradfree.feedback.random_feedback import FeedbackEngine
from gradfree.layers.layer_chain import LayerChain, normalised

_SCALE = 0.05 * sqrt(2.0)
"""Factor from the Kaiming-uniform matrix to F, which is 0.05 · U(±√(6/inputs)) as published."""


@dataclass(frozen=True, kw_only=True)
class PEPITA(FeedbackEngine):
    """PEPITA: two forward passes and no backward pass; a fixed random matrix F maps the error to the input.

    Dellaferrera and Kreiman, "Error-driven input modulation", ICML 2022, arXiv 2201.11665. A second pass, with the same
    dropout masks, starts from x - F e. The gradient of layer l is (h_l - h̃_l) h̃_{l-1}ᵀ, with h̃ of the second pass;
    that of the last layer is e h̃_{L-1}ᵀ. The paper adds F e and subtracts the update, which is the same for a random
    F. With our sign, F approximates the product of the transposed weights, as in FOTON and in the improved version
    (Srinivasan et al., "Forward learning with top-down feedback", ICLR 2024, arXiv 2302.05440). The first published
    code uses the second pass's error for the last layer of dense networks, ẽ h̃_{L-1}ᵀ, and the mean over positions in
    convolutions; here positions are summed, as in backpropagation.

    As in ``foton``, each sample's error is normalised for the second pass and the differences are scaled back, so
    gradients are linear in the loss. Biases get the sum of h_l - h̃_l, modules before the chain F e.

    The activation normalisation of the improved version is not an option: it changes the forward pass, which engines
    must not do. Applied to the gradients only, it would be a learning rate for each layer that depends on the other
    samples of the batch. Normalise the inputs instead.

    Outputs must be (samples, classes).

    Args:
        seed: of the random matrix F.
    """

    @property
    def runs_again(self) -> bool:
        """True: gradients use the inputs of a second pass."""
        return True

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients: differences between the two passes times the inputs of the second one."""
        unit, norms = normalised(error)
        return chain.two_passes(error, _SCALE * self.random_projection(chain, unit, 0), norms, at_second=True)
