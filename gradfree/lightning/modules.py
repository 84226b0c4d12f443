"""A LightningModule for classification."""

from __future__ import annotations

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric


class Classifier(pl.LightningModule):
    """Trains a classifier by the mean cross-entropy; the command line or a subclass adds the optimizer.

    Batches are inputs and class indices, int64 (B,). Logs ``train_loss``, and ``val_loss``, ``val_accuracy``,
    ``test_loss`` and ``test_accuracy``.

    Args:
        net: returns logits (B, classes) for a batch's inputs.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.accuracy = net, MeanMetric()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits for ``inputs``."""
        return self.net(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss, logged as ``train_loss``."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Log ``test_loss`` and ``test_accuracy``."""
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        logits = self(inputs)
        self.accuracy.update((logits.argmax(1) == targets).float())
        self.log(f"{stage}_loss", F.cross_entropy(logits, targets), sync_dist=True)
        self.log(f"{stage}_accuracy", self.accuracy, prog_bar=True)
