"""PEPITA, error-driven input modulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from gradfree.chains.chain import ChainGradients
from gradfree.chains.memory import Memory
from gradfree.devices.hardware import sent
from gradfree.engines.feedback import FeedbackEngine, matrix_key
from gradfree.engines.options import check_count, check_positive
from gradfree.layers.layer_chain import LayerChain, normalised, scaled
from gradfree.layers.roles import Role, role_of, weight_of
from gradfree.torchside.optimizer_steps import AfterStep
from gradfree.torchside.sharding import whole

_SCALE = 0.05 * sqrt(2.0)
"""Of F, besides the Kaiming-uniform matrix: together 0.05 · U(±√(6/inputs)), as published."""
_SAMPLES = 128
"""Samples of noise that one mirroring sends through each layer."""


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

    Takes outputs (samples, classes), with ``mirror_every`` any.

    Args:
        seed: what F is drawn from.
        mirror_every: optimizer steps from one weight mirroring (Akrout et al. 2019, arXiv 1904.05391) to the next; 0
            for none. With it F is a product B_1 ... B_L of matrices shaped like the transposed weights; each is led
            towards its own by noise that is sent through the layer: B_l + rate · mean(x yᵀ), y = W_l x, scaled back
            to the norm of B_l.
        mirror_rate: of the mirroring, for noise of unit variance.
    """

    mirror_every: int = 0
    mirror_rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "mirror_every", least=0)
        check_positive(self, "mirror_rate")

    @property
    def runs_again(self) -> bool:
        """Whether layers run once more: always, their gradients are taken at the second pass's inputs."""
        return True

    def after_step(self, memory: Memory) -> AfterStep | None:
        """Return what mirrors the weights as often as asked."""
        if not self.mirror_every:
            return None

        def mirror_if_due(blocks: Mapping[str, nn.Module], steps: int) -> None:
            if steps % self.mirror_every == 0:
                self._mirror(blocks, memory, steps)

        return mirror_if_due

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the differences between the two passes, times the second one's inputs, as gradients."""
        unit, norms = normalised(error)
        feedback = self._feedback(chain, unit)
        total = chain.zero()
        if chain.recording.goes_on:
            total = total._replace(initial=scaled(feedback, norms))
        compared = chain.compared(feedback, norms, second=True)
        del unit, feedback
        chain.add_compared(compared, error, total)
        return total

    def _feedback(self, chain: LayerChain, error: Tensor) -> Tensor:
        """Return F e, shaped like the chain's input."""
        if not self.mirror_every:
            return _SCALE * self.sent(chain, error, 0)
        factors = {
            link.path: self.matrix(chain.memory, link.path, weight_of(link.block).shape, error)
            for link in chain.links[: chain.last + 1]
            if role_of(link.block) is Role.WEIGHTS
        }
        return _SCALE * chain.transposed(error, factors)

    @torch.no_grad()
    def _mirror(self, blocks: Mapping[str, nn.Module], memory: Memory, steps: int) -> None:
        """Lead every B_l towards its layer's weight, which noise tells it; of a convolution for a single window."""
        for path, layer in blocks.items():
            if role_of(layer) is Role.WEIGHTS:
                weight = whole(weight_of(layer))
                matrix = self.matrix(memory, path, weight.shape, weight)
                noise = torch.empty(_SAMPLES, weight[0].numel(), dtype=torch.float32, device="cpu")
                noise.normal_(generator=self.generator(f"{path}, step {steps}"))
                noise = sent(noise, matrix.device).to(matrix.dtype)
                answer = noise @ weight.flatten(1).mT.to(matrix)
                moved = matrix + self.mirror_rate / _SAMPLES * (answer.mT @ noise).view_as(matrix)
                memory.of("feedback")[matrix_key(path, weight.shape)] = moved * (matrix.norm() / moved.norm())
