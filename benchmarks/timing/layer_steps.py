"""Cost of a training step of an ``orthogonal_mlp``: time, and memory beside torch's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isqrt
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint_sequential

from gradfree import create_model
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.timing.side_by_side import MEMORY, PROCESS, RATIO, STEP, Trainee, mean_seconds
from gradfree.benchmarks.timing.timed import Timing, timed

_CLASSES = 10
_LEARNING_RATE = 0.1
"""Large enough to train: weights drift and are retracted as in a real training run."""
_LAYERS = 200
"""A turn takes as many steps as run this many layers in total, at least one."""
EACH, SEGMENTS = "each block", "√L segments"


@dataclass(frozen=True)
class Network:
    """An ``orthogonal_mlp`` whose inputs are as wide as its hidden layers, with a batch of random examples."""

    depth: int
    width: int
    batch: int

    def __str__(self) -> str:
        return f"{self.depth} layers of {self.width}, batch {self.batch}"


def build_trainee(network: Network, row: Row, device: str, seed: int) -> Trainee:
    """Return a network in training with the row's engine attached."""
    torch.manual_seed(seed)
    sizes = {"in_features": network.width, "depth": network.depth, "width": network.width}
    model = create_model("orthogonal_mlp", num_classes=_CLASSES, **sizes).float().to(device)
    inputs = torch.randn(network.batch, network.width).float().to(device)
    targets = torch.randint(_CLASSES, (network.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    row.create_engine().attach(model)
    return Trainee(model, optimizer, F.cross_entropy, inputs, targets)


@timed(
    kind="step",
    subject="network",
    # A multiple of every row's ``orthogonalize_every``.
    runs=16,
    title="cost of a step of an orthogonal_mlp",
    legend="One step with SGD. All rows share a process: hooks of engines that keep weights orthogonal take time in "
    "the steps of other rows, too.",
)
def step_costs(case: Timing) -> Mapping[str, Callable[[], Trainee]]:
    """Return, by row, a function that builds the network in training with the row's engine."""
    return {row.label: partial(build_trainee, case.item, row, case.device, case.seed) for row in case.rows}


@dataclass(frozen=True)
class Checkpointed(Row):
    """An engine on a network with torch's checkpoints, which store some layers' inputs and recompute the others.

    Attributes:
        kept: what is checkpointed: "each block", a layer with its activation function, or "√L segments" of blocks.
    """

    kept: str


class _Steps:
    """Several steps; a call returns their mean seconds, on a CPU of processor time, which excludes other processes."""

    def __init__(self, case: Timing, row: Row):
        network: Network = case.item
        self.trainee, self.device = build_trainee(network, row, case.device, case.seed), case.device
        self.runs = max(1, _LAYERS // network.depth)
        if isinstance(row, Checkpointed):
            layers: Any = self.trainee.model.layers
            blocks = [layers[i : i + 2] for i in range(0, len(layers), 2)]
            segments = len(blocks) if row.kept == EACH else isqrt(network.depth)
            run = partial(checkpoint_sequential, blocks, segments, use_reentrant=False)
            object.__setattr__(layers, "forward", lambda x: run(input=x))

    def __call__(self) -> float:
        """Take the steps."""
        if self.device != "cpu":
            return mean_seconds(self.trainee, self.runs)
        start = process_time()
        for _ in range(self.runs):
            self.trainee()
        return (process_time() - start) / self.runs

    def peak_memory(self) -> int:
        """Return the peak memory of one step."""
        return self.trainee.peak_memory()


@timed(
    kind="memory step",
    subject="network",
    rounds=3,
    runs=1,
    with_memory=True,
    title="time against memory of a step of an orthogonal_mlp",
    legend="One step with SGD by number of hidden layers, in processor time. MiB: peak memory of the step, with "
    "gradients, without weights. Checkpoints: torch.utils.checkpoint, not reentrant, of each layer with its activation "
    "function, or of √L segments of such blocks, the last of which is stored.",
    columns=[
        column("layers: step (×)", STEP, unit=RATIO),
        column("layers: MiB", MEMORY, "{value:.1f}", "MiB"),
        column("layers: process MiB", PROCESS, "{value:.0f}"),
    ],
    across="at",
    place=lambda network: {"setting": str(network), "at": float(network.depth)},
    against=(Figure(MEMORY, unit="MiB"), Axis("peak memory of a step (MiB)", "log")),
)
def memory_steps(case: Timing) -> Mapping[str, Callable[[], _Steps]]:
    """Return, by row, a function that builds the network in training."""
    return {row.label: partial(_Steps, case, row) for row in case.rows}
