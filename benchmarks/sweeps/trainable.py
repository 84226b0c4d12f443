"""A check that a task can be trained, before a run starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradfree.benchmarks.tasks.task import Task
from gradfree.cli import UsageError
from gradfree.wording import one


def check_trainable(task: Task) -> Task:
    """Return ``task`` if its model accepts its data.

    Raises:
        UsageError: the model or the loss fails, the loss is not a scalar, or a batch exceeds the training set.
    """
    train = task.on("cpu", task.data().train)
    count = len(train.inputs)
    if task.batch_size > count:
        raise UsageError(f"{task.title}: a batch of {task.batch_size} is more than the {count} training examples.")
    outputs: Any = torch.empty(0)
    try:
        model = task.create_model(0)
        with torch.no_grad():
            outputs = model(train.inputs[:2])
            loss = task.loss(outputs, train.targets[:2])
    except UsageError:
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, (TypeError, ValueError, RuntimeError)) else repr(error)
        if not isinstance(outputs, Tensor):
            cause = f"the model returns {one(type(outputs).__name__)}, not a tensor, and the loss fails with {error!r}"
        raise UsageError(f"{task.title} cannot be trained on these data: {cause}") from error
    if loss.numel() != 1:
        raise UsageError(
            f"{task.title} cannot be trained: its loss is not a scalar, but has shape {tuple(loss.shape)}."
        )
    return task
