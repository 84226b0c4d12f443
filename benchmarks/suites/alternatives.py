"""Alternatives to backpropagation on five models."""

from __future__ import annotations

from dataclasses import replace

from gradfree.benchmarks.data.augmentation import crop_and_flip
from gradfree.benchmarks.data.stored import Images
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.forward_only import DFA, FA, MNIST, PEPITA
from gradfree.benchmarks.suites.rows import BACKPROP, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import TINYSHAKESPEARE
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.comparison import Comparison

_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
_WIDE = (1e-4, *_RATES, 3e-2)
_CODING = (
    *iterated("predictive_coding", 2, 8),
    Row("predictive_coding exact", "predictive_coding", {"iterations": 64, "rate": 1.0}),
)


def _fa(*feedback: str) -> tuple[Row, ...]:
    """Return a row of ``fa`` for each kind of feedback."""
    return tuple(Row(f"fa {kind}", "fa", {"feedback": kind}) for kind in feedback)


_FEEDBACK = _fa("sign", "usf", "brsf", "frsf", "learned")
RULES = (BACKPROP, FA, *_FEEDBACK, DFA, *_CODING, *iterated("fixed_point", 2), *iterated("highway_bp", 0, 2))
"""Rows for models with skip connections, autograd first."""

_LAYERED = (
    BACKPROP,
    FA,
    *_fa("sign", "learned", "mirror"),
    DFA,
    Row("drtp", "drtp", {}),
    Row("target_propagation", "target_propagation", {}),
    *iterated("predictive_coding", 2),
)
"""Rows for models without skip connections, autograd first."""

_RESIDUAL = (BACKPROP, FA, *_fa("sign"), *iterated("fixed_point", 2), *iterated("highway_bp", 0, 2))
"""Rows for the models with skip connections that train for long, autograd first."""

_FORWARD = (PEPITA, Row("forward_gradient", "forward_gradient", {}), Row("mezo", "mezo", {}))
"""Rows without a backward pass, on the smallest model only: on others they hardly learn, and take the longest."""

MLP = Task(
    name="mnist_mlp",
    data=Images("mnist", column="image", train=55000, validation=5000),
    model="mlp",
    options={"in_features": 784, "num_classes": 10},
    score=MNIST.score,
    learning_rate=1e-3,
    batch_size=128,
    steps=10 * 430,
    chains=("layers",),
)
LENET = replace(
    MLP,
    name="cifar10_lenet",
    data=Images("cifar10", column="img", train=45000, validation=5000),
    model="lenet",
    options={"in_channels": 3, "image_size": 32},
    learning_rate=3e-3,
    steps=30 * 352,
    augment=crop_and_flip,
)
RESNET = Task(
    name="cifar10_resnet",
    data=Images("cifar10", column="img", train=20000, validation=2000),
    model="preact_resnet",
    options={"depth": 14, "width": 8},
    score=MNIST.score,
    learning_rate=3e-3,
    batch_size=64,
    steps=200,
)
RESNET20 = replace(
    LENET,
    name="cifar10_resnet20",
    model="preact_resnet",
    options={"depth": 20},
    batch_size=64,
    chains=None,
    steps=6 * 703,
)
GPT = replace(
    TINYSHAKESPEARE,
    name="tinyshakespeare_gpt",
    model="gpt",
    options={"vocab_size": 66, "context": 128, "layers": 4, "width": 64, "heads": 4},
    learning_rate=1e-3,
    steps=300,
)
GPT_LONG = replace(GPT, name="tinyshakespeare_gpt_long", steps=4 * 490)

TASKS = (MLP, LENET, RESNET, RESNET20, GPT, GPT_LONG)
"""Tasks for the command line."""

ALTERNATIVES: Suite = (
    Comparison(MLP, (*_LAYERED, *_FORWARD), _WIDE, trial_steps=2 * 430),
    Comparison(LENET, _LAYERED, _WIDE, trial_steps=2 * 352),
    Comparison(RESNET20, _RESIDUAL, _WIDE[1:], trial_steps=351),
    Comparison(GPT_LONG, (*_RESIDUAL, DFA), _WIDE[1:], trial_steps=490),
    Comparison(RESNET, RULES, _RATES[1:]),
    Comparison(GPT, RULES, _RATES),
)
