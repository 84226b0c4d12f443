"""Forward-only training of orthogonal networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import Memory
from gradfree.chains.site import Site
from gradfree.engines.layered import LayerEngine
from gradfree.engines.options import check_count
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import LayerChain, normalised
from gradfree.orthogonal.isometry import inexact_layers
from gradfree.orthogonal.orthogonal_engine import OrthogonalEngine
from gradfree.torchside.optimizer_steps import AfterStep

_PERTURBATIONS = ("difference", "tangent")


@dataclass(frozen=True, kw_only=True)
class FOTON(OrthogonalEngine, LayerEngine):
    """Forward-only training of orthogonal networks: two forward passes and no backward pass.

    "Forward-Only Training of Orthogonal Networks" (FOTON), arXiv 2512.20668. The error e at the last layer is mapped to
    the input by the transposed linear parts of all layers, F = W_1ᵀ ... W_Lᵀ. A second pass starts from x - F e. The
    gradient of layer l is (h_l - h̃_l) h_{l-1}ᵀ, with h of the first and h̃ of the second pass; that of the last layer
    is e h_{L-1}ᵀ. For linear layers this is A Aᵀ δ with A = W_l ... W_1, where backpropagation has δ. Both are equal if
    all rows are orthonormal, which is impossible for a layer with more outputs than inputs. Of the activation
    functions, only those of layer l and of earlier layers enter its gradient.

    Works with any loss. In the published code, errors have norms of about one. Here each sample's error is normalised
    for the second pass and the differences are scaled back, so gradients are linear in the loss. Biases get the sum of
    h_l - h̃_l; the published code has no biases. Modules before the chain get F e.

    Args:
        refresh_feedback_every: the number of optimizer steps for which F is kept, as a matrix (classes, inputs); with
            1, F is always that of the current weights.
        streaming: whether the first pass stores no activations and both passes run side by side in the backward pass.
            Memory does not grow with depth, at the cost of one more forward pass. The same gradients.
        perturbation: "difference", the paper's; or "tangent", its limit for small errors, by forward-mode
            differentiation.

    The other options are those of :class:`~gradfree.orthogonal.orthogonal_engine.OrthogonalEngine`, which keeps the
    weights orthogonal.
    """

    worth_trying: ClassVar = ({}, {"streaming": True})
    refresh_feedback_every: int = 1
    streaming: bool = False
    perturbation: str = "difference"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "refresh_feedback_every", least=1)
        if not isinstance(self.streaming, bool):
            raise TypeError(f"FOTON: streaming must be True or False, not {self.streaming!r}.")
        if self.perturbation not in _PERTURBATIONS:
            raise ValueError(f"FOTON: perturbation must be 'difference' or 'tangent', not {self.perturbation!r}.")

    def notes_about(self, site: Site) -> Iterator[str]:
        """Yield a note for each layer that makes the gradients inexact."""
        yield from inexact_layers(site.blocks)

    @property
    def streams(self) -> bool:
        """Return ``streaming``."""
        return self.streaming

    def after_step(self, memory: Memory) -> AfterStep:
        """Return a function that retracts the weights, and drops the stored F if it is due."""
        retract = super().after_step(memory)

        def after(blocks: Mapping[str, nn.Module], steps: int) -> None:
            retract(blocks, steps)
            if steps % self.refresh_feedback_every == 0:
                memory.of("foton").clear()

        return after

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients, for the error without the temperature."""
        assert isinstance(chain, LayerChain)
        return super().gradients(chain, self.without_temperature(chain, direct))

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients, from the differences between the two passes."""
        norms: Tensor | None
        if self.perturbation == "tangent":
            # A tangent is linear in the error, so it needs no normalisation.
            entering, norms = error.to(torch.promote_types(error.dtype, torch.float32)), None
        else:
            entering, norms = normalised(error)
        return chain.two_passes(error, self._feedback(chain, entering), norms)

    def _feedback(self, chain: LayerChain, error: Tensor) -> Tensor:
        """Return F e, shaped like the chain's input."""
        samples, classes = error.shape if error.dim() == 2 else (len(error), len(error))
        keeps = self.refresh_feedback_every > 1
        if keeps and error.dim() != 2:
            raise ChainError(
                f"FOTON: refresh_feedback_every={self.refresh_feedback_every} keeps F as a matrix, which takes outputs "
                f"(samples, classes), but {chain.links[chain.last].path!r} returns {tuple(error.shape)}. Use 1."
            )
        if not keeps and classes >= samples:
            return chain.transposed(error)
        kept, key = chain.memory.of("foton"), f"F from {chain.links[0].path} to {chain.links[chain.last].path}"
        matrix = kept.get(key) if keeps else None
        if matrix is None or matrix.shape[1:] != chain.shape(0)[1:]:
            matrix = chain.transposed(torch.eye(classes, dtype=error.dtype, device=error.device))
        matrix = matrix.to(error)  # A matrix from a checkpoint may be on another device.
        if keeps:
            kept[key] = matrix
        return torch.einsum("nc,c...->n...", error, matrix)
