"""A check that a task can be trained, before a run starts."""

from __future__ import annotations

import torch

from gradfree.benchmarks.tasks.task import Task
from gradfree.cli import UsageError


def check_trainable(task: Task) -> Task:
    """Return ``task`` if its model accepts its data.

    Raises:
        UsageError: the model or the loss fails, the loss is not a scalar, or a batch exceeds the training set.
    """
    train = task.on("cpu", task.data().train)
    count = len(train.inputs)
    if task.batch_size > count:
        raise UsageError(f"{task.title}: a batch of {task.batch_size} is more than the {count} training examples.")
    try:
        model = task.create_model(0)
        with torch.no_grad():
            loss = task.loss(model(train.inputs[:2]), train.targets[:2])
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{task.title} cannot be trained on these data: {type(error).__name__}: {error}") from error
    if loss.numel() != 1:
        raise UsageError(
            f"{task.title} cannot be trained: its loss is not a scalar, but has shape {tuple(loss.shape)}."
        )
    return task
