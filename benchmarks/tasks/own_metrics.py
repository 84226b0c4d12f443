"""Metrics that torchmetrics does not have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchmetrics import MeanMetric


class Accuracy(MeanMetric):
    """Accuracy for logits whose last dimension is the classes.

    Args:
        ignored: a class that does not count where it is the target.
    """

    higher_is_better = True  # type: ignore[assignment]

    def __init__(self, ignored: int | None = None):
        super().__init__()
        self.ignored = ignored

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add logits (B, ..., classes) and class indices (B, ...)."""
        right = (preds.argmax(-1) == target).double()
        super().update(right if self.ignored is None else right[target != self.ignored])


class MeanLoss(MeanMetric):
    """Mean of a loss over examples."""

    higher_is_better = False  # type: ignore[assignment]

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor | float]):
        super().__init__()
        self.loss = loss

    def update(self, preds: Tensor, target: Tensor) -> None:  # type: ignore[override]
        """Add outputs and targets."""
        # The mean, where the loss is one number for each example: the weight counts the examples already.
        super().update(torch.as_tensor(self.loss(preds, target)).double().mean(), len(target))


class MeanScore(MeanLoss):
    """Mean of a score over examples."""

    higher_is_better = True
