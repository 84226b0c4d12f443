"""A small suite on forward-only training at depth, after FOTON.

"Forward-Only Training of Orthogonal Networks", arXiv 2512.20668. The paper's tables were not available: the settings
are those of the only configuration in the published code. docs/results/papers.md has the abstract's claims beside our
figures.
"""

from __future__ import annotations

from dataclasses import replace

from gradfree.benchmarks.data.images import Images
from gradfree.benchmarks.suites.forward_only import ROWS
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.tasks.schedules import ConstantSGDTask
from gradfree.benchmarks.training.depths import DepthSweep

_MNIST = ConstantSGDTask(
    name="foton_mnist_small",
    data=Images("mnist", column="image", train=20000, validation=1000),
    model="orthogonal_mlp",
    options={"in_features": 784, "num_classes": 10, "width": 64},
    score=DIGITS.score,
    learning_rate=0.5,
    batch_size=64,
    steps=300,
    momentum=0.0,
)


def _relu(task: ConstantSGDTask) -> ConstantSGDTask:
    return replace(task, name=f"{task.name}_relu", options={**task.options, "activation": "relu"})


def _sweep(task: ConstantSGDTask, *depths: int) -> DepthSweep:
    return DepthSweep(task, {depth: {"depth": depth} for depth in depths}, ROWS, (0.03, 0.1, 0.3, 1.0))


FOTON_DEPTH_SMALL: Suite = (_sweep(_MNIST, 2, 10, 50), _sweep(_relu(_MNIST), 2, 10))
