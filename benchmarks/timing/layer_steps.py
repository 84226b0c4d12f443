"""Cost of a training step of an ``orthogonal_mlp``: time by phase, and memory beside torch's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from gradfree import create_model
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.side_by_side import MEMORY, RATIO, STEP, Trainee, Turn, mean_seconds, now, time_of
from gradfree.benchmarks.timing.timed import Timing, timed
from gradfree.orthogonal.orthogonal_engine import OrthogonalEngine

_CLASSES = 10
_LEARNING_RATE = 0.1
"""Large enough to train: weights drift and are retracted as in a real training run."""
_PHASES = ("passes", "update", "retraction")
_IDLE = "time of other rows' hooks"
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

    def create_model(self) -> nn.Module:
        """Return the network, in float32."""
        sizes = {"in_features": self.width, "depth": self.depth, "width": self.width}
        return create_model("orthogonal_mlp", num_classes=_CLASSES, **sizes).float()


def build_trainee(network: Network, row: Row, device: str, seed: int) -> Trainee:
    """Return a network in training with the row's engine attached."""
    torch.manual_seed(seed)
    model = network.create_model().to(device)
    inputs = torch.randn(network.batch, network.width).float().to(device)
    targets = torch.randint(_CLASSES, (network.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    row.create_engine().attach(model)
    return Trainee(model, optimizer, F.cross_entropy, inputs, targets)


def _step_in_phases(case: Timing, row: Row) -> Callable[[], Turn]:
    """Return a training step that returns the seconds of its phases."""
    trainee = build_trainee(case.item, row, case.device, case.seed)
    updated = 0.0

    def note_update(*_: Any) -> None:
        nonlocal updated
        updated = now(case.device)

    def step() -> Turn:
        start = now(case.device)
        trainee.passes()
        passed = now(case.device)
        trainee.optimizer.step()
        return passed - start, updated - passed, now(case.device) - updated

    # Runs before the engines' retraction: that is a hook for all optimizers, and an optimizer's own hooks run first.
    trainee.optimizer.register_step_post_hook(note_update)
    return step


def _median_phases(case: Timing, step: Any, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the median seconds of each phase."""
    return {"phases": list(map(median, zip(*turns, strict=True)))}


def _facts_of(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the times of a row's phases.

    All rows share one process, so each row's steps also call the retraction hooks of the others.
    """
    retracts = results["row"] is not None and isinstance(results["row"].create_engine(), OrthogonalEngine)
    for phase, seconds in zip(_PHASES, cost.get("phases", ()), strict=False):
        yield fact(_IDLE if phase == _PHASES[-1] and not retracts else time_of(phase), "s", seconds)


@timed(
    kind="step",
    subject="network",
    # A multiple of every row's ``orthogonalize_every``.
    runs=16,
    title="cost of a step of an orthogonal_mlp",
    legend="One step with SGD. Passes: forward and backward pass, or its replacement. Retraction: only of engines that "
    "keep weights orthogonal; in the steps of others, hooks of these engines in the same process take time.",
    columns=[
        *(column(f"{phase} (ms)", time_of(phase), "{value:.1f}", factor=1e3) for phase in _PHASES),
        column("step (×)", STEP, unit=RATIO),
        column("quartiles", STEP, "{low:.2f}–{high:.2f}", RATIO),
    ],
    costs=_median_phases,
    facts=_facts_of,
)
def step_phases(case: Timing) -> Mapping[str, Callable[[], Callable[[], Turn]]]:
    """Return, by row, a function that builds the network in training with the row's engine."""
    return {row.label: partial(_step_in_phases, case, row) for row in case.rows}


@dataclass(frozen=True)
class Checkpointed(Row):
    """An engine on a network with torch's checkpoints, which store some layers' inputs and recompute the others.

    Attributes:
        kept: what is checkpointed: "each block", a layer with its activation function, or "√L segments" of blocks.
    """

    kept: str


def checkpoint_layers(layers: nn.Sequential, blocks: Sequence[nn.Module], segments: int) -> None:
    """Let the forward pass of ``layers`` run ``blocks`` in ``segments`` checkpointed segments."""
    run = partial(checkpoint_sequential, blocks, segments, use_reentrant=False)
    object.__setattr__(layers, "forward", lambda x: run(input=x))


class _Steps:
    """Several steps; a call returns their mean seconds, on a CPU of processor time, which excludes other processes."""

    def __init__(self, case: Timing, row: Row):
        network: Network = case.item
        self.trainee, self.device = build_trainee(network, row, case.device, case.seed), case.device
        self.runs = max(1, _LAYERS // network.depth)
        if isinstance(row, Checkpointed):
            layers: Any = self.trainee.model.layers
            blocks = [layers[i : i + 2] for i in range(0, len(layers), 2)]
            checkpoint_layers(layers, blocks, len(blocks) if row.kept == EACH else isqrt(network.depth))

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
    columns=[column("layers: step (×)", STEP, unit=RATIO), column("layers: MiB", MEMORY, "{value:.1f}", "MiB")],
    across="at",
    place=lambda network: {"setting": str(network), "at": float(network.depth)},
    against=(Figure(MEMORY, unit="MiB"), Axis("peak memory of a step (MiB)", "log")),
)
def memory_steps(case: Timing) -> Mapping[str, Callable[[], _Steps]]:
    """Return, by row, a function that builds the network in training."""
    return {row.label: partial(_Steps, case, row) for row in case.rows}
