"""Tasks: data, a model, a loss, a score, and the length of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import cos, inf, isnan, nan, pi
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from gradfree import create_model
from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.records.case import ADDED
from gradfree.benchmarks.tasks.imported import Imported
from gradfree.cli import UsageError

if TYPE_CHECKING:
    from torchmetrics import Metric

_CHUNK = 32
"""Batch size for scores: the logits of a word model are large."""

_WARMUP = 0.1
_FLOOR = 0.1
"""Shares of :class:`AdamTask`: of its steps for the warm-up, and of its learning rate at the end."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (B, ..., classes) and class indices (B, ...)."""
    return nn.functional.cross_entropy(logits.movedim(-1, 1), targets)


@dataclass(frozen=True)
class Score:
    """The score of a trained model.

    Attributes:
        name: name in reports.
        unit: unit in reports.
        metric: returns the metric, which must have ``higher_is_better``.
        factor: multiplies the metric's value to convert it to ``unit``.
    """

    name: str
    unit: str
    metric: Callable[[], Metric]
    factor: float = 1.0

    @cached_property
    def higher_is_better(self) -> bool:
        """The metric's ``higher_is_better``."""
        return bool(self.metric().higher_is_better)

    @torch.no_grad()
    def of(self, model: nn.Module, split: Split) -> float:
        """Return the score of ``model`` on ``split`` in evaluation mode; the model's modes are restored.

        NaN if an output is NaN: an accuracy would count the first class as the prediction.
        """
        diverged = False
        metric = self.metric().to(split.inputs.device)
        modes = {module: module.training for module in model.modules()}
        model.eval()
        for inputs, targets in zip(split.inputs.split(_CHUNK), split.targets.split(_CHUNK), strict=True):
            outputs = model(inputs)
            diverged |= isinstance(outputs, Tensor) and bool(outputs.isnan().any())
            metric.update(outputs, targets)
        for module, training in modes.items():
            module.training = training
        return nan if diverged else self.factor * metric.compute().item()

    def goodness(self, value: float) -> float:
        """Return ``value`` with the sign that makes higher better; -inf for NaN, the score of a diverged run."""
        if isnan(value):
            return -inf
        return value if self.higher_is_better else -value


@dataclass(frozen=True)
class Task:
    """A training job, the same for every engine. AdamW; the learning rate is warmed up for a tenth, then annealed.

    Attributes:
        name: short name, part of case ids.
        data: returns the data.
        model: name of a registered model.
        options: options of the model.
        score: the score of the trained model.
        learning_rate: maximal learning rate.
        batch_size: examples a step.
        steps: number of training steps.
        loss: called with the model's output and the targets.
        evaluations: how many times the validation score is measured during training.
        dtype: dtype of weights and inputs; torch's default if not given.
        chains: module paths of the model's chains; found automatically if not given.
        builder: the user's function that returns the model, instead of a registered one.
        augment: changes the inputs of each batch in training at random; called with them and a generator.
    """

    name: str
    data: Callable[[], Data]
    model: str
    options: Mapping[str, Any]
    score: Score
    learning_rate: float
    batch_size: int
    steps: int
    loss: Callable[[Tensor, Tensor], Tensor] = field(default=cross_entropy, kw_only=True)
    evaluations: int = field(default=0, metadata=ADDED, kw_only=True)
    dtype: str | None = field(default=None, metadata=ADDED, kw_only=True)
    chains: tuple[str, ...] | None = field(default=None, metadata=ADDED, kw_only=True)
    builder: Imported | None = field(default=None, metadata=ADDED, kw_only=True)
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = field(default=None, metadata=ADDED, kw_only=True)
    course: ClassVar[str] = "warmed up for a tenth of the steps, then annealed"

    def __str__(self) -> str:
        return self.name

    @property
    def title(self) -> str:
        """The task's name and the model's; for a model of the user, the first begins with the second."""
        return self.name if self.name.startswith(self.model) else f"{self.name}: {self.model}"

    @property
    def optimizer(self) -> str:
        """The optimizer with its settings except the learning rate."""
        optimizer, _ = self.create_optimizer(nn.Linear(1, 1))
        defaults = {name: optimizer.defaults.get(name) for name in ("momentum", "betas", "weight_decay")}
        settings = ", ".join(f"{name}={value}" for name, value in defaults.items() if value)
        return type(optimizer).__name__ + (f"({settings})" if settings else "")

    def loss_of(self, model: nn.Module, batch: Split) -> Tensor:
        """Return the loss of ``model`` on a batch."""
        return self.loss(model(batch.inputs), batch.targets)

    def create_model(self, seed: int) -> nn.Module:
        """Return the model initialised with ``seed``."""
        torch.manual_seed(seed)
        model = self.builder.build(**self.options) if self.builder else create_model(self.model, **self.options)
        return model.to(dtype=self._dtype)

    def check(self) -> None:
        """Raise if the task cannot be trained.

        Raises:
            UsageError: the model or the loss fails, the loss is not a scalar, or a batch exceeds the training set.
        """
        train = self.on("cpu", self.data().train)
        if self.batch_size > (count := len(train.inputs)):
            raise UsageError(f"{self.title}: a batch of {self.batch_size} is more than the {count} training examples.")
        try:
            model = self.create_model(0)
            with torch.no_grad():
                loss = self.loss(model(train.inputs[:2]), train.targets[:2])
        except UsageError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise UsageError(f"{self.title} cannot be trained on these data: {problem}") from error
        if loss.numel() != 1:
            shape = tuple(loss.shape)
            raise UsageError(f"{self.title} cannot be trained: its loss is not a scalar, but has shape {shape}.")

    def on(self, device: str, split: Split) -> Split:
        """Return ``split`` on ``device``, in the task's dtype."""
        return Split(*(x.to(device, self._dtype if x.is_floating_point() else None) for x in split))

    @property
    def _dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else getattr(torch, self.dtype)

    def create_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return the optimizer and its learning rate schedule."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        return optimizer, self.schedule(optimizer)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the learning rate schedule of ``optimizer``."""
        # OneCycleLR divides by zero for a warm-up of exactly one step; a shorter one is no warm-up either.
        warm_up = 0.0 if self.steps == 10 else 0.1
        return OneCycleLR(
            optimizer, self.learning_rate, total_steps=self.steps, pct_start=warm_up, cycle_momentum=False
        )

    def batches(self, split: Split, seed: int) -> Iterator[Split]:
        """Yield one batch a step; each epoch's order and the inputs' changes depend only on ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        queue = torch.empty(0, dtype=torch.int64)
        for _ in range(self.steps):
            if len(queue) < self.batch_size:
                queue = torch.cat([queue, torch.randperm(len(split.inputs), generator=generator)])
            chosen, queue = queue[: self.batch_size], queue[self.batch_size :]
            inputs = split.inputs[chosen]
            yield Split(self.augment(inputs, generator) if self.augment else inputs, split.targets[chosen])


@dataclass(frozen=True)
class TextTask(Task):
    """A task that reads a text in order, for a model that carries its state from batch to batch.

    Each row of the batches reads one part of the text, and starts again at its end.
    """

    def batches(self, split: Split, seed: int) -> Iterator[Split]:
        """Yield one batch a step."""
        part = len(split.inputs) // self.batch_size
        starts = part * torch.arange(self.batch_size)
        for step in range(self.steps):
            yield Split(split.inputs[starts + step % part], split.targets[starts + step % part])


@dataclass(frozen=True)
class SGDTask(Task):
    """A task with SGD.

    AdamW gives all elements of a weight steps of similar size, which together move an orthogonal matrix far from
    orthogonality; engines that retract it undo most of such a step.

    Attributes:
        momentum: SGD's momentum.
    """

    momentum: float

    def create_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return the optimizer and its learning rate schedule."""
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)
        return optimizer, self.schedule(optimizer)


@dataclass(frozen=True, kw_only=True)
class AdamTask(Task):
    """A task with Adam; the learning rate is warmed up for a tenth of the steps, then a cosine down to a tenth.

    Attributes:
        weight_decay: weight decay added to the gradients, as in Adam and unlike AdamW.
        max_norm: always ``None``; a part of the ids of records since gradients could be clipped.
    """

    weight_decay: float = 0.0
    max_norm: None = None
    course: ClassVar[str] = "warmed up for a tenth of the steps, then a cosine down to a tenth"

    def create_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Return the optimizer and its learning rate schedule."""
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        return optimizer, self.schedule(optimizer)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the learning rate schedule of ``optimizer``."""
        warmup = max(1, round(_WARMUP * self.steps))
        rest = max(1, self.steps - warmup)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return _FLOOR + (1 - _FLOOR) * (1 + cos(pi * min(1.0, (step - warmup) / rest))) / 2

        return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class ConstantSGDTask(SGDTask):
    """A task with SGD at a constant learning rate."""

    course: ClassVar[str] = "throughout"

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Return the learning rate schedule of ``optimizer``."""
        return LambdaLR(optimizer, lambda _: 1.0)
