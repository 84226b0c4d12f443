"""A small suite on forward-only training at depth, after FOTON.

"Forward-Only Training of Orthogonal Networks", arXiv 2512.20668. The paper's tables were not available: the settings
are those of the only configuration in the published code, and the claims are the abstract's.
"""

from __future__ import annotations

from dataclasses import replace

from gradfree.benchmarks.data.images import Images
from gradfree.benchmarks.suites.forward_only import CIFAR10, COLD, PEPITA, ROWS, WARM
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tables.published import Claim, Published, WithPublished
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.tasks.metrics import fine_accuracy
from gradfree.benchmarks.tasks.schedules import ConstantSGDTask
from gradfree.benchmarks.tasks.task import Score
from gradfree.benchmarks.training.depths import DepthSweep

_RATES = (0.03, 0.1, 0.3, 1.0)

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


_FINE = Score("accuracy", "%", fine_accuracy, factor=100.0)

CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    data=Images("cifar100", column="img", train=20000, validation=2000, label="fine_label"),
    options={**CIFAR10.options, "num_classes": 100},
    score=_FINE,
)


def _relu(task: ConstantSGDTask) -> ConstantSGDTask:
    return replace(task, name=f"{task.name}_relu", options={**task.options, "activation": "relu"})


def _sweep(task: ConstantSGDTask, *depths: int, rates: tuple[float, ...] = _RATES) -> DepthSweep:
    return DepthSweep(task, {depth: {"depth": depth} for depth in depths}, ROWS, rates)


def _compared(sweeps: tuple[DepthSweep, ...], *differs: str) -> Suite:
    """Return the sweeps, each followed by the same beside the abstract's claims."""
    return tuple(part for sweep in sweeps for part in (sweep, WithPublished(sweep, _published(sweep, differs))))


def _published(sweep: DepthSweep, differs: tuple[str, ...]) -> Published:
    return Published(
        source="FOTON (arXiv 2512.20668), abstract (its tables were not available)",
        hardware="not available",
        columns=tuple(map(str, sweep.depths)),
        claims=tuple(
            Claim("FOTON outperforms PEPITA", str(depth), (PEPITA.label, row.label))
            for row in (COLD, WARM)
            for depth in sweep.depths
        ),
        differs=(
            "activation, depths and rates of its figures are unknown: tanh and ReLU are run",
            *differs,
        ),
    )


FOTON_DEPTH_SMALL: Suite = _compared(
    (_sweep(_MNIST, 2, 10, 50), _sweep(_relu(_MNIST), 2, 10)),
    "300 steps of 64 images of MNIST for 100 epochs of 256 of CIFAR-100, 64 units for 256, no dropout",
    "each row and depth at its own learning rate for 0.5",
)
