"""Learning rate schedules of the papers' tasks."""

import pytest
import torch
from tiny_suite import TASK

from gradfree.benchmarks.tasks.task import AdamTask


def test_the_rate_rises_for_a_tenth_and_falls_to_a_tenth():
    task = AdamTask(**{**vars(TASK), "steps": 30})
    optimizer, schedule = task.create_optimizer(torch.nn.Linear(1, 1))
    found = []
    for _ in range(task.steps):
        found.append(optimizer.param_groups[0]["lr"] / task.learning_rate)
        optimizer.step()
        schedule.step()
    assert found[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[16] == pytest.approx(0.55, abs=0.05)
    assert found[-1] == pytest.approx(0.1, abs=0.01)
