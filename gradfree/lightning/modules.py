"""LightningModules for any network: what ``gradfree fit`` trains."""

from __future__ import annotations

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.text import Perplexity


class _Predictor(pl.LightningModule):
    """Trains ``net`` by cross-entropy; ``metric`` of its logits and the targets is logged as ``name``."""

    def __init__(self, net: nn.Module, name: str, metric: Metric):
        super().__init__()
        self.net, self.name, self.metric = net, name, metric

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits for ``inputs``."""
        return self.net(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss, logged as ``train_loss``."""
        _, loss = self._solve(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log ``val_loss`` and the metric, with the same prefix."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log ``test_loss`` and the metric, with the same prefix."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        logits, loss = self._solve(batch)
        self.metric.update(logits, batch[1])
        self.log(f"{stage}_loss", loss, sync_dist=True)
        self.log(f"{stage}_{self.name}", self.metric, prog_bar=True)

    def _solve(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self(inputs)
        return logits, F.cross_entropy(logits.movedim(-1, 1), targets)


class _Accuracy(MeanMetric):
    """Share of the targets, class indices (B,), that logits (B, classes) get right; any number of classes."""

    def update(self, logits: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """Add a batch."""
        super().update((logits.argmax(1) == targets).float())


class Classifier(_Predictor):
    """Trains a network to classify, by the mean cross-entropy; the optimizer is the command line's, or a subclass's.

    Batches are inputs and class indices, int64 (B,). Logs ``train_loss``, and ``val_loss``, ``val_accuracy``,
    ``test_loss`` and ``test_accuracy``.

    Args:
        net: returns logits (B, classes) for a batch's inputs.
    """

    def __init__(self, net: nn.Module):
        super().__init__(net, "accuracy", _Accuracy())


class LanguageModel(_Predictor):
    """Trains a network to predict the next token, by the mean cross-entropy; the optimizer as of :class:`Classifier`.

    Batches are tokens and the next token of each, both int64 (B, T). Logs ``train_loss``, and ``val_loss``,
    ``val_perplexity``, ``test_loss`` and ``test_perplexity``.

    Args:
        net: returns logits (B, T, vocabulary) for tokens.
    """

    def __init__(self, net: nn.Module):
        super().__init__(net, "perplexity", Perplexity())
