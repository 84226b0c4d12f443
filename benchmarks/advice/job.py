"""The user's model, batches and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.tasks.imported import Imported
from gradfree.benchmarks.tasks.loaded import batches_of, sources, squared_error
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.cli import UsageError
from gradfree.wording import one

_BATCH_SIZE = 32
"""Batch size for examples without batches."""
_BATCHES = 4
"""Number of batches kept in memory for timing."""

Batch = Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """The user's model and data.

    Attributes:
        model: ``module:function``, which returns the model.
        data: ``module:function``, which returns the examples: a pair of tensors, a data set, or an iterable of batches.
            Batches are used unchanged: ``(*inputs, target)``, or mappings of the model's keyword arguments. Of several
            splits, as :class:`~gradfree.benchmarks.tasks.loaded.Loaded` has them, the training split is used.
        loss: ``module:function``, called with outputs and targets, or only with outputs if batches are mappings. By
            default, the outputs' ``loss`` if they have one, else cross-entropy for integer targets and the squared
            error for others.
        chains: module paths of the chains; found automatically if not given.
        device: the device.
    """

    model: str
    data: str
    loss: str | None
    chains: Sequence[str] | None
    device: str

    def build(self) -> nn.Module:
        """Return a new model in training mode."""
        return Imported.find(self.model).build().to(self.device).train()

    def _on_device(self, batch: Any) -> Batch:
        if isinstance(batch, (Sequence, Mapping)) and len(batch):
            if self.device == "cpu":
                return batch
            from lightning.fabric.utilities.apply_func import move_data_to_device

            moved: Batch = move_data_to_device(batch, torch.device(self.device))
            return moved
        raise UsageError(
            f"{self.data} has a batch that is {one(type(batch).__name__)}, not inputs and a target, nor a mapping of "
            "the model's keyword arguments."
        )

    @cached_property
    def batches(self) -> list[Batch]:
        """The first few batches."""
        given = sources(Imported.find(self.data).result(), self.data)
        found = islice(batches_of(given["train"], _BATCH_SIZE, self.data), _BATCHES)
        batches = [self._on_device(batch) for batch in found]
        if not batches:
            raise UsageError(f"{self.data} has no batch.")
        return batches

    @property
    def inputs(self) -> Any:
        """The model's inputs in the first batch."""
        batch = self.batches[0]
        return batch if isinstance(batch, Mapping) else tuple(batch[:-1])

    @property
    def shapes(self) -> str:
        """The shapes of the first batch as text."""
        batch = self.batches[0]
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return ", ".join(str(tuple(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)

    @cached_property
    def loss_fn(self) -> Callable[..., Tensor]:
        """The loss function of outputs and a target; of outputs only if batches are mappings."""
        return _default_loss if self.loss is None else Imported.find(self.loss)

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of ``model`` on ``batch``."""
        if isinstance(batch, Mapping):
            return self.loss_fn(model(**batch))
        *inputs, target = batch
        return self.loss_fn(model(*inputs), target)


def _default_loss(outputs: Any, target: Any = None) -> Tensor:
    """Return the outputs' own loss if there is one, else the usual loss for the target's dtype."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
        raise TypeError(
            f"there is no default loss for outputs that are {one(type(outputs).__name__)} and a target that is "
            f"{one(type(target).__name__)}: give one, --loss module:function."
        )
    return squared_error(outputs, target) if target.is_floating_point() else cross_entropy(outputs, target)
