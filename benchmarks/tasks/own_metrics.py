"""Metrics that torchmetrics does not have."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from gradfree.benchmarks.data.synthetic import BLANK, COPYING_VOCABULARY


class RecallAccuracy(MulticlassAccuracy):
    """Accuracy on the symbols of ``copying``; blanks do not count."""

    def __init__(self) -> None:
        super().__init__(COPYING_VOCABULARY, average="micro", ignore_index=BLANK)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add logits (B, T, vocabulary) and targets (B, T)."""
        super().update(preds.flatten(0, 1), target.flatten())


class Accuracy(MeanMetric):
    """Accuracy for logits whose last dimension is the classes."""

    higher_is_better = True  # type: ignore[assignment]

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add logits (B, ..., classes) and class indices (B, ...)."""
        super().update((preds.argmax(-1) == target).double())


class MeanLoss(MeanMetric):
    """Mean of a loss over examples."""

    higher_is_better = False  # type: ignore[assignment]

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.loss = loss

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add outputs and targets."""
        super().update(self.loss(preds, target).double(), len(target))
