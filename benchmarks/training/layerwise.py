"""Training runs that are looked at layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from gradfree import Fidelity
from gradfree.benchmarks.training.training import Training
from gradfree.orthogonal.weights import drift, is_matrix, weights_of

_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class LayerwiseTraining(Training):
    """A training run that keeps each layer's alignment with its true gradient, and how orthogonal the weights stay."""

    kind: ClassVar[str] = "layerwise training"

    def probed(self, fidelity: Fidelity) -> dict[str, Any]:
        """Return the whole gradient's fidelity and the cosine of each layer's, in their order."""
        layers = [round(agreement.cosine, _DIGITS) for agreement in fidelity.layers.values()]
        return {**super().probed(fidelity), "layers": layers}

    def watched(self, model: nn.Module) -> dict[str, Any]:
        """Return the largest ‖W Wᵀ - I‖ of the weights."""
        return {"drift": drift(weights_of(filter(is_matrix, model.modules()))).max().item()}
