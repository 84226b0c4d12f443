"""A benchmark suite that takes seconds, in a module that worker processes can import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import ClassVar

import torch
from torchmetrics.classification import BinaryAccuracy

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import SCHEMA
from gradfree.benchmarks.tables.experiment import cases
from gradfree.benchmarks.tasks.task import Score, Task
from gradfree.benchmarks.timing.timed import Timing
from gradfree.benchmarks.timing.timed import speed as speed_of_steps
from gradfree.benchmarks.training.comparison import Comparison, Training


def points():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 4, generator=generator)
    targets = (inputs.sum(1, keepdim=True) > 0).to(inputs.dtype)
    return Data(*(Split(x, y) for x, y in zip(inputs.split(16), targets.split(16), strict=True)))


def endless():
    """Block until the worker is killed."""
    threading.Event().wait()


def failing():
    raise OSError("no such points")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaving():
    sys.exit(7)


def points_if_there():
    return points() if os.environ["POINTS"] else failing()


def littered():
    """Fail on a second call in the same process."""
    assert not hasattr(sys, "litter")
    sys.litter = True
    return points()


TASK = Task(
    name="points",
    data=points,
    model="residual_mlp",
    options={"in_features": 4, "num_classes": 1, "depth": 4, "width": 8},
    loss=torch.nn.functional.binary_cross_entropy_with_logits,
    score=Score("accuracy", "%", BinaryAccuracy, factor=100.0),
    learning_rate=0.01,
    batch_size=8,
    steps=7,
)
PLAIN = Row("backprop", "backprop", {"plain": True})
CHAIN = Row("backprop via chain", "backprop", {"plain": False})
HIGHWAY = Row("highway_bp k=1", "highway_bp", {"iterations": 1})
SUITE = (Comparison(TASK, (PLAIN, CHAIN, HIGHWAY)),)
TUNED = Comparison(TASK, (PLAIN, HIGHWAY), learning_rates=(0.001, 0.01, 0.1))


@dataclass(frozen=True, kw_only=True)
class Parentage(Case):
    """Records the process that its own was started from."""

    kind = "parentage"
    topic = subject = "parent"
    config: ClassVar = {}

    def run(self):
        return {"parent": os.getppid()}


def suite():
    return SUITE


def training(row=PLAIN, task=TASK, seed=0, device="cpu"):
    return Training(task=task, row=row, seed=seed, device=device)


def speed(rows=(PLAIN, CHAIN, HIGHWAY)):
    return Timing(timed=speed_of_steps, item=TASK, rows=rows, seed=0, device="cpu")


def tiny_cases(seeds=1):
    return list(cases(SUITE, seeds, "cpu", {}))


def fake(case, results):
    """Return the id and record of a case with made-up results."""
    return case.id, {
        "schema": SCHEMA,
        "case": case.id,
        "kind": case.kind,
        "config": case.config,
        "seeds": [case.seed],
        "results": results,
        "environment": {"threads": 1, "device": case.device},
        "timestamp": "",
    }
