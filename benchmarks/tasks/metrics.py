"""What torchmetrics measures. Importing it takes seconds, so it is imported when the first metric is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric


def perplexity() -> Metric:
    """Return the perplexity."""
    from torchmetrics.text import Perplexity

    return Perplexity()


def mean_squared_error() -> Metric:
    """Return the mean squared error."""
    from torchmetrics import MeanSquaredError

    return MeanSquaredError()


def digit_accuracy() -> Metric:
    """Return the share of digits that are recognised."""
    return _share_of(10)


def parity_accuracy() -> Metric:
    """Return the share of parities that are right."""
    return _share_of(2)


def fine_accuracy() -> Metric:
    """Return the share of images of a hundred classes that are recognised."""
    return _share_of(100)


def _share_of(classes: int) -> Metric:
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(num_classes=classes, average="micro")


def recall_accuracy() -> Metric:
    """Return the share of the symbols of ``copying`` that are recalled; blanks do not count."""
    from gradfree.benchmarks.tasks.own_metrics import RecallAccuracy

    return RecallAccuracy()


def accuracy() -> Metric:
    """Return the share of the examples whose class has the largest logit; classes come last."""
    from gradfree.benchmarks.tasks.own_metrics import Accuracy

    return Accuracy()


@dataclass(frozen=True)
class LossMetric:
    """Makes the mean of a loss over examples; has a name that tells the loss."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self) -> Metric:
        """Return a new metric."""
        from gradfree.benchmarks.tasks.own_metrics import MeanLoss

        return MeanLoss(self.loss)
