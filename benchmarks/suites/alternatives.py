"""Alternatives to backpropagation on four models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradfree.benchmarks.data.stored import Images
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.forward_only import DFA, FA, FOTON, MNIST, PEPITA
from gradfree.benchmarks.suites.rows import BACKPROP, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import TINYSHAKESPEARE
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.comparison import Comparison

_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
_FEEDBACK = tuple(Row(f"fa {kind}", "fa", {"feedback": kind}) for kind in ("sign", "usf", "brsf", "frsf", "learned"))
_CODING = (
    *iterated("predictive_coding", 2, 8),
    Row("predictive_coding exact", "predictive_coding", {"iterations": 64, "rate": 1.0}),
)
_ANYWHERE = (BACKPROP, FA, *_FEEDBACK, DFA, *_CODING, *iterated("fixed_point", 2))
_PLAIN = (*_ANYWHERE, Row("forward_gradient", "forward_gradient", {}), PEPITA, FOTON)
RULES = (*_ANYWHERE, *iterated("highway_bp", 0, 2))
"""Rows for models with skip connections, autograd first."""

MLP = Task(
    name="mnist_mlp",
    data=MNIST.data,
    model="orthogonal_mlp",
    options={**MNIST.options, "depth": 3},
    score=MNIST.score,
    learning_rate=3e-3,
    batch_size=64,
    steps=600,
    chains=("layers",),
)
LENET = replace(
    MLP,
    name="cifar10_lenet",
    data=Images("cifar10", column="img", train=20000, validation=2000),
    model="lenet",
    options={"in_channels": 3, "image_size": 32},
    steps=400,
)
RESNET = replace(
    LENET, name="cifar10_resnet", model="preact_resnet", options={"depth": 14, "width": 8}, steps=200, chains=None
)
GPT = replace(
    TINYSHAKESPEARE,
    name="tinyshakespeare_gpt",
    model="gpt",
    options={"vocab_size": 66, "context": 128, "layers": 4, "width": 64, "heads": 4},
    learning_rate=1e-3,
    steps=300,
)

TASKS = (MLP, LENET, RESNET, GPT)
"""Tasks for the command line."""

_ON_MNIST = Comparison(MLP, _PLAIN, _RATES)
_ON_CIFAR10 = Comparison(LENET, _PLAIN, _RATES)
_WITH_SKIPS = Comparison(RESNET, RULES, _RATES[1:])

ALTERNATIVES: Suite = (_ON_MNIST, _ON_CIFAR10, _WITH_SKIPS, Comparison(GPT, RULES, _RATES))

_CHOSEN: Mapping[str, Mapping[str, float]] = {
    "mnist_mlp": {
        "predictive_coding k=2": 1e-2,
        "fixed_point k=2": 1e-2,
        "forward_gradient": 1e-3,
        "foton": 1e-2,
    },
    "cifar10_lenet": {
        "fa": 1e-3,
        "fa learned": 1e-2,
        "predictive_coding k=2": 1e-2,
        "fixed_point k=2": 1e-2,
        "foton": 3e-4,
    },
}
"""Learning rates that suite "alternatives" chose, where they differ from the task's."""

ALTERNATIVES_SHORT: Suite = tuple(
    replace(part, learning_rates=(), rates=_CHOSEN[part.task.name]) for part in (_ON_MNIST, _ON_CIFAR10)
)
