"""Functions that return torchmetrics' metrics. Importing it takes seconds, so they import it when called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gradfree.benchmarks.data.synthetic import BLANK

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
    """Return the accuracy for 10 classes."""
    return accuracy()


def parity_accuracy() -> Metric:
    """Return the accuracy for 2 classes."""
    return accuracy()


def recall_accuracy() -> Metric:
    """Return the accuracy on the symbols of ``copying``; blanks do not count."""
    return accuracy(ignored=BLANK)


def accuracy(ignored: int | None = None) -> Metric:
    """Return the accuracy for logits whose last dimension is the classes."""
    from gradfree.benchmarks.tasks.own_metrics import Accuracy

    return Accuracy(ignored)


@dataclass(frozen=True)
class LossMetric:
    """Returns a metric that is the mean of a loss over examples."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self) -> Metric:
        """Return a new metric."""
        from gradfree.benchmarks.tasks.own_metrics import MeanLoss

        return MeanLoss(self.loss)


@dataclass(frozen=True)
class ScoreMetric:
    """Returns a metric that is the mean of a score over examples; higher is better."""

    score: Callable[[Tensor, Tensor], Tensor | float]

    def __call__(self) -> Metric:
        """Return a new metric."""
        from gradfree.benchmarks.tasks.own_metrics import MeanScore

        return MeanScore(self.score)
