"""Suites that train networks of orthogonal layers without a backward pass."""

from __future__ import annotations

from dataclasses import replace

from gradfree.benchmarks.data.bundled import digits
from gradfree.benchmarks.data.stored import Images
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.tasks.task import SGDTask
from gradfree.benchmarks.timing.nets import EACH, SEGMENTS, Checkpointed, Network, memory_steps, step_costs
from gradfree.benchmarks.timing.orthogonal_layers import orthogonal_layers
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.depths import DepthSweep

_AS_FOTON = {"orthogonalize_every": None, "orthogonalize_steps": 1}
"""Options of ``orthogonal_backprop`` for the constraint of ``foton``."""

ORTHOGONAL = Row("orthogonal_backprop", "orthogonal_backprop", _AS_FOTON)
FOTON = Row("foton", "foton", {})
STREAMING = Row("foton streaming", "foton", {"streaming": True})
TANGENT = Row("foton tangent", "foton", {"perturbation": "tangent"})
DFA = Row("dfa", "dfa", {})
FA = Row("fa", "fa", {})
PEPITA = Row("pepita", "pepita", {})


def _orthogonal(*temperatures: float) -> tuple[Row, ...]:
    """Return a row of each engine that keeps weights orthogonal, at each temperature."""
    return tuple(
        Row(f"{engine} T={temperature:g}", engine, {"temperature": temperature, **_AS_FOTON})
        for engine in ("orthogonal_backprop", "foton")
        for temperature in temperatures
    )


_, _WARM_BACKPROP, COLD, WARM = _orthogonal(1.0, 16.0)
ROWS = (*_orthogonal(1.0, 16.0), BACKPROP, DFA, PEPITA)

_RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
# PEPITA's best rates are up to a hundred times those of the other rows.
MORE_RATES = (0.01, *_RATES, 10.0, 30.0)

ORTHOGONAL_DIGITS = SGDTask(
    name="digits_orthogonal",
    data=digits,
    model="orthogonal_mlp",
    options={"in_features": 64, "num_classes": 10},
    score=DIGITS.score,
    learning_rate=0.3,
    batch_size=64,
    steps=300,
    momentum=0.0,
)
_RELU_DIGITS = replace(
    ORTHOGONAL_DIGITS, name="digits_relu", options={**ORTHOGONAL_DIGITS.options, "activation": "relu"}
)
MNIST = replace(
    ORTHOGONAL_DIGITS,
    name="mnist",
    data=Images("mnist", column="image", train=20000, validation=2000),
    options={"in_features": 784, "num_classes": 10, "width": 128},
    steps=600,
)
_LENET = replace(MNIST, name="mnist_lenet", model="orthogonal_lenet", options={})
CIFAR10 = replace(
    MNIST,
    name="cifar10",
    data=Images("cifar10", column="img", train=20000, validation=2000),
    options={"in_features": 3072, "num_classes": 10, "width": 128},
    steps=400,
)
_CONVNET = replace(CIFAR10, name="cifar10_conv", model="orthogonal_convnet", options={})
TASKS = (ORTHOGONAL_DIGITS, MNIST, CIFAR10)


def _mlps(*depths: int) -> dict[int, dict[str, int]]:
    return {depth: {"depth": depth} for depth in depths}


QUICK = Comparison(
    replace(ORTHOGONAL_DIGITS, options={**ORTHOGONAL_DIGITS.options, "depth": 20}, batch_size=1024, steps=100),
    (BACKPROP, _WARM_BACKPROP, WARM),
    rates={"backprop": 0.3, "orthogonal_backprop T=16": 1.0, "foton T=16": 1.0},
)
"""A short comparison for suite "quick". Rates: of 0.3, 1 and 3 the best on validation data, with another seed."""

_RARELY = (Row(f"foton every {steps}", "foton", {"orthogonalize_every": steps}) for steps in (1, 4, 8))
_COSTLY = (BACKPROP, ORTHOGONAL, FOTON, TANGENT, STREAMING, *_RARELY, DFA, FA, PEPITA)

FORWARD_ONLY: Suite = (
    DepthSweep(MNIST, ROWS, MORE_RATES, depths=_mlps(5, 20, 50)),
    DepthSweep(_LENET, ROWS, MORE_RATES, depths={4: {}}),
    DepthSweep(CIFAR10, ROWS, MORE_RATES, depths=_mlps(5, 20)),
    DepthSweep(_CONVNET, ROWS, MORE_RATES, depths={3 * depth: {"stage_depth": depth} for depth in (1, 2)}),
    DepthSweep(ORTHOGONAL_DIGITS, (*ROWS, FA), MORE_RATES, depths=_mlps(2, 10, 50)),
    DepthSweep(_RELU_DIGITS, (*_orthogonal(1.0), BACKPROP, DFA, PEPITA), MORE_RATES, depths=_mlps(2, 5, 10)),
    Timings(step_costs, (Network(depth=20, width=512, batch=256),), _COSTLY, threads=2),
)

_TEMPERATURES = (COLD, WARM, FOTON, TANGENT)

TEMPERATURE: Suite = (
    DepthSweep(MNIST, _TEMPERATURES, _RATES, depths=_mlps(5, 20)),
    DepthSweep(CIFAR10, _TEMPERATURES, _RATES, depths=_mlps(5, 20)),
    DepthSweep(ORTHOGONAL_DIGITS, _TEMPERATURES, _RATES, depths=_mlps(10)),
)
"""FOTON's temperature, fixed and learnt, and the limit of a small perturbation with the learnt one."""


def _checkpointed(row: Row) -> tuple[Row, ...]:
    """Return ``row`` without checkpoints, with a checkpoint for each block, and with √L checkpoints."""
    rows = (Checkpointed(f"{row.label}, {kept}", row.engine, row.options, kept) for kept in (EACH, SEGMENTS))
    return (row, *rows)


FORWARD_MEMORY: Suite = (
    Timings(
        memory_steps,
        tuple(Network(depth=depth, width=64, batch=512) for depth in (10, 100, 1000)),
        (*_checkpointed(BACKPROP), *_checkpointed(ORTHOGONAL), FOTON, STREAMING),
        threads=1,
    ),
)
"""Time and memory of a step, beside torch's checkpoints."""

_WIDTHS = ((64, 64), (128, 64), (256, 128), (512, 128), (512, 1024))
ORTHOGONAL_LAYERS: Suite = (
    Timings(
        orthogonal_layers,
        tuple(Network(depth=4, width=width, batch=batch) for width, batch in _WIDTHS),
        (
            replace(ORTHOGONAL, options={}),
            replace(ORTHOGONAL, label=f"{ORTHOGONAL.label} once a step", options={"orthogonalize_steps": 1}),
            replace(ORTHOGONAL, label=f"{ORTHOGONAL.label} on drift"),
            FOTON,
        ),
        threads=1,
    ),
)
"""Layers that stay orthogonal, beside torch's parametrization."""
