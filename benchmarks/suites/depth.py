"""Suites of deep nets, where an engine can compute the VJPs of all blocks at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from gradfree.benchmarks.data.bundled import digits
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP, iterated
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tasks.catalogue import DIGITS, PYDOC
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.nets import DeepNet, deep_steps
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.target import TimeToTarget


def segments(count: int, k: int) -> Row:
    """Return a row of Highway-BP with k iterations and ``count`` segments."""
    return Row(f"highway_bp C={count} k={k}", "highway_bp", {"iterations": k, "segments": count})


def mlp(depth: int, width: int, batch: int) -> DeepNet:
    """Return a residual MLP whose blocks have one hidden layer of the same width."""
    options = {"in_features": width, "num_classes": 10, "depth": depth, "width": width, "expansion": 1}
    return DeepNet("residual_mlp", options, batch, (width,), 10, f"residual MLP of width {width}", depth)


def gpt(layers: int, width: int, batch: int) -> DeepNet:
    """Return a GPT, two blocks a layer."""
    options = {"vocab_size": 128, "context": 128, "layers": layers, "width": width, "heads": 4}
    return DeepNet("gpt", options, batch, (128,), 128, f"GPT of width {width}", 2 * layers, tokens=True)


def vit(layers: int, width: int, batch: int) -> DeepNet:
    """Return a vision transformer for images of CIFAR's size, two blocks a layer."""
    options = {"layers": layers, "width": width, "heads": 4}
    return DeepNet("vit", options, batch, (3, 32, 32), 10, f"ViT of width {width}", 2 * layers)


def resnet(depth: int, batch: int) -> DeepNet:
    """Return a pre-activation ResNet for images of CIFAR's size."""
    blocks = (depth - 2) // 2
    return DeepNet("preact_resnet", {"depth": depth}, batch, (3, 32, 32), 10, f"ResNet-{depth}", blocks)


def _mapped(nets: tuple[DeepNet, ...], rows: tuple[Row, ...], threads: int, title: str, compiled: int = 0) -> Timings:
    """Return the timing of nets; those of up to ``compiled`` blocks are also compiled, which takes long."""
    return Timings(deep_steps, nets, rows, threads, title, lambda net: {"compiled": net.depth <= compiled})


_MAPPED = (*iterated("highway_bp", 0, 2, 4), segments(8, 1))
DEPTH_MAP: Suite = (
    _mapped(
        (
            *(mlp(*sizes) for sizes in product((16, 64, 256), (16, 32, 64, 128), (8, 64))),
            mlp(128, 64, 16),
            mlp(256, 32, 32),
        ),
        _MAPPED,
        threads=1,
        title="residual MLPs",
        compiled=16,
    ),
    # "depth-training" trains two of them. Compiling one takes minutes.
    _mapped(
        (mlp(64, 32, 32), gpt(12, 32, 4), mlp(128, 32, 64)),
        _MAPPED,
        threads=1,
        title="deeper nets, compiled too",
        compiled=128,
    ),
    _mapped((mlp(128, 64, 16), mlp(256, 32, 32), mlp(256, 64, 64)), _MAPPED, threads=2, title="residual MLPs"),
)

_DIGITS_MLP_128 = Task(
    name="digits_mlp_128",
    data=digits,
    model="residual_mlp",
    options={"in_features": 64, "num_classes": 10, "depth": 128, "width": 32, "expansion": 1},
    score=DIGITS.score,
    learning_rate=1e-3,  # not tuned
    batch_size=64,
    steps=150,
    evaluations=10,
)
# Learning rate: 3e-3, not tuned.
RESIDUAL_QUICK = Comparison(
    replace(
        _DIGITS_MLP_128,
        name="digits_mlp_64",
        options={**_DIGITS_MLP_128.options, "depth": 64},
        learning_rate=3e-3,
        batch_size=32,
        steps=200,
        evaluations=0,
    ),
    (BACKPROP, *iterated("highway_bp", 0, 2)),
)
"""A short comparison for suite "quick"."""

_PYDOC_GPT_24 = replace(
    PYDOC,
    name="pydoc_gpt_24",
    options={**PYDOC.options, "layers": 12, "width": 32, "heads": 2},
    steps=600,
    evaluations=10,
)


def _trained(task: Task, target: float, *rates: float) -> Suite:
    compared = Comparison(task, (BACKPROP, *iterated("highway_bp", 0, 2, 4)), learning_rates=rates)
    return compared, TimeToTarget(compared, target)


DEPTH_TRAINING: Suite = (
    *_trained(_DIGITS_MLP_128, 94.0, 3e-4, 1e-3, 3e-3, 1e-2),
    *_trained(_PYDOC_GPT_24, 18.0, 1e-3, 2e-3, 4e-3, 8e-3),
)

_GPU_ROWS = (*iterated("highway_bp", 0, 1, 2, 4), *(segments(count, 1) for count in (2, 4, 8)))


def _gpu_nets(batch: int) -> tuple[DeepNet, ...]:
    return mlp(128, 256, batch), gpt(24, 128, batch), vit(24, 128, batch), resnet(110, batch)


GPU_DEPTH: Suite = (
    # A small net first, so that a failure on the device shows within seconds.
    _mapped((mlp(16, 64, 16),), _GPU_ROWS, threads=1, title="a small net"),
    _mapped(tuple(net for batch in (1, 16, 256) for net in _gpu_nets(batch)), _GPU_ROWS, threads=1, title="deep nets"),
    # Compiling one takes minutes.
    _mapped(_gpu_nets(16), _GPU_ROWS, threads=1, title="deep nets, compiled too", compiled=128),
)
