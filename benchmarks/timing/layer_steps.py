"""What one training step of a plain chain of layers costs: its time, taken apart, and its activation memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan, nan
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import nn
from torch.utils.benchmark import set_torch_threads

from gradfree import create_model
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import Styles, add_legend, count_axis, draw_curves, draw_stacks, log_axis
from gradfree.benchmarks.tables.experiment import Experiment, matching
from gradfree.benchmarks.tables.printed import Fact, Plots, PrintedSection, Spread
from gradfree.benchmarks.timing.memory import peak_memory
from gradfree.benchmarks.timing.speed import Timing, compared, now
from gradfree.orthogonal.engine import OrthogonalEngine

_ROUNDS = 9
_STEPS = 16
"""Of a round: a multiple of those from one retraction to the next."""
_CLASSES = 10
_LEARNING_RATE = 0.1
"""One that trains: weights drift, and are led back, as they would."""
_MIB = 2**20


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


class Phases(NamedTuple):
    """Seconds of a training step."""

    passes: float
    update: float
    retraction: float


@dataclass(frozen=True, kw_only=True)
class StepTiming(Timing):
    """Time of a training step with plain SGD, the rows in turns, and of its phases."""

    kind: ClassVar[str] = "step"
    network: Network

    @property
    def topic(self) -> str:
        """The network."""
        return str(self.network)

    def run(self) -> dict[str, Any]:
        """Measure; return for each row its times in seconds, ratios to the first row's, and medians of the phases."""
        trainees = [_Trainee(self.network, row, self.device, self.seed) for row in self.rows]
        with set_torch_threads(self.threads):
            _, *rounds = ([_round(trainee) for trainee in trainees] for _ in range(1 + _ROUNDS))
        steps = list(zip(*rounds, strict=True))
        rows = compared((row.label for row in self.rows), [[sum(phases) for phases in own] for own in steps])
        phases = [[median(phase) for phase in zip(*own, strict=True)] for own in steps]
        return {"rows": [row | {"phases": own} for row, own in zip(rows, phases, strict=True)]}


class _Trainee:
    """A network in training with one row's engine, on one batch over and over."""

    def __init__(self, network: Network, row: Row, device: str, seed: int):
        self.device = device
        torch.manual_seed(seed)
        self.model = network.create_model().to(device)
        self.inputs = torch.randn(network.batch, network.width).float().to(device)
        self.targets = torch.randint(_CLASSES, (network.batch,), device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)
        # An optimizer's own hooks come before those for all optimizers, which is what engines retract by.
        self.optimizer.register_step_post_hook(lambda *_: self._note_update())
        row.create_engine().attach(self.model)

    def passes(self) -> None:
        """Run forward and backward pass."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.inputs), self.targets).backward()

    def step(self) -> Phases:
        """Take one training step; return how long its phases took."""
        start = now(self.device)
        self.passes()
        passed = now(self.device)
        self.optimizer.step()
        return Phases(passed - start, self._updated - passed, now(self.device) - self._updated)

    def _note_update(self) -> None:
        self._updated = now(self.device)


def _round(trainee: _Trainee) -> Phases:
    """Return the mean of some steps."""
    steps = [trainee.step() for _ in range(_STEPS)]
    return Phases(*(sum(phase) / _STEPS for phase in zip(*steps, strict=True)))


@dataclass(frozen=True, kw_only=True)
class ActivationMemory(Case):
    """Peak memory of forward and backward pass at several depths, less the gradients that it leaves behind."""

    kind: ClassVar[str] = "activations"
    networks: tuple[Network, ...]
    row: Row

    @property
    def topic(self) -> str:
        """The networks."""
        return f"{self.networks[0]} to {self.networks[-1].depth} layers"

    @property
    def subject(self) -> str:
        """The row's label."""
        return self.row.label

    def run(self) -> dict[str, Any]:
        """Measure; return bytes by network."""
        return {"activations": [self._measure(network) for network in self.networks]}

    def _measure(self, network: Network) -> int:
        trainee = _Trainee(network, self.row, self.device, self.seed)
        trainee.passes()  # What the engine keeps from pass to pass is there before.
        trainee.optimizer.zero_grad()
        return peak_memory(trainee.passes, self.device) - sum(p.nbytes for p in trainee.model.parameters())


@dataclass(frozen=True)
class StepCosts(Experiment):
    """Engines on chains of equal layers.

    Attributes:
        timed: the network whose step is timed.
        small: another, of which memory is measured: many examples and narrow layers, so that weights count for little.
        depths: for memory, ascending.
        rows: the engines. The first is the baseline of the others.
        threads: for torch to use in the timing.
    """

    timed: Network
    small: Network
    depths: tuple[int, ...]
    rows: tuple[Row, ...]
    threads: int

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the case that times all rows, then one on the memory of each."""
        yield self._step(device)
        for row in self.rows:
            yield self._activations(row, device)

    def printed(self, records: Mapping[str, Record], device: str) -> PrintedSection | None:
        """Return the figures of ``device``, once the rows have been timed."""
        steps = [record["results"]["rows"] for record in matching(records, self._step(device))]
        memory = [
            [record["results"]["activations"] for record in matching(records, self._activations(row, device))]
            for row in self.rows
        ]
        if not steps:
            return None
        unknown = [nan] * len(self.depths)
        return CostSection(self, steps[0], [found[0] if found else unknown for found in memory], device)

    def _step(self, device: str) -> StepTiming:
        return StepTiming(network=self.timed, rows=self.rows, threads=self.threads, device=device, seed=0)

    def _activations(self, row: Row, device: str) -> ActivationMemory:
        networks = tuple(replace(self.small, depth=depth) for depth in self.depths)
        return ActivationMemory(networks=networks, row=row, device=device, seed=0)


@dataclass(frozen=True)
class CostSection(PrintedSection):
    """Phases of a step, and activation memory by depth, a row an engine."""

    part: StepCosts
    steps: Sequence[dict[str, Any]]
    memory: Sequence[Sequence[float]]
    device: str

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"cost of a step: orthogonal_mlp, {self.part.timed}, device: {self.device}, threads: {self.part.threads}"

    @property
    def legend(self) -> str:
        """Say what the columns mean."""
        small, deepest = self.part.small, self.part.depths[-1]
        return (
            f"One step with plain SGD; medians and quartiles of {_ROUNDS} interleaved rounds of {_STEPS} steps, "
            f"retractions included. Passes: forward and backward, or what stands for it.{self._idle} Step: all three, "
            "as a multiple of the first row's. MiB: peak memory of the passes by depth, with layers of "
            f"{small.width} and batch {small.batch}, less the weights' gradients, "
            f"{_gradients(replace(small, depth=deepest)):.1f} MiB at "
            f"{deepest} layers, which every engine leaves behind."
        )

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row an engine."""
        phases = [f"{name} (ms)" for name in Phases._fields]
        yield ["engine", *phases, "step (×)", "quartiles", *(f"MiB at {depth}" for depth in self.part.depths)]
        for step, memory in zip(self.steps, self.memory, strict=True):
            milliseconds = [f"{1e3 * phase:.1f}".replace("nan", "–") for phase in self._phases(step)]
            ratio = Spread.recorded(step, "ratio")
            times = [f"{ratio.median:.2f}", f"{ratio.low:.2f}–{ratio.high:.2f}"]
            mebibytes = [f"{peak / _MIB:.1f}".replace("nan", "–") for peak in memory]
            yield [step["label"], *milliseconds, *times, *mebibytes]

    @property
    def _idle(self) -> str:
        """Say what stands where nothing is retracted: in one process, each row's steps call the hooks of all."""
        idle = [Phases(*step["phases"]).retraction for step in self.steps if step["label"] not in self._retracting]
        if not idle:
            return ""
        return f" –: the engine retracts nothing; other rows' hooks, {1e3 * max(idle):.1f} ms at most, are in its step."

    @cached_property
    def _retracting(self) -> set[str]:
        """The labels of engines that retract."""
        return {row.label for row in self.part.rows if isinstance(row.create_engine(), OrthogonalEngine)}

    def _phases(self, step: Mapping[str, Any]) -> Phases:
        """Return the phases of a row; NaN for the retraction of an engine that has none."""
        phases = Phases(*step["phases"])
        return phases if step["label"] in self._retracting else phases._replace(retraction=nan)

    def verdicts(self) -> list[str]:
        """Return how each row's speed compares to the first's, in words."""
        baseline, *others = self.steps
        return ["the baseline", *(verdict.speed(Spread.recorded(o, "ratio"), baseline["label"]) for o in others)]

    def remarks(self) -> Iterator[str]:
        """Yield what part of a step retraction takes, and how memory grows with depth."""
        shares = [
            f"{step['label']} {100 * self._phases(step).retraction / sum(step['phases']):.0f} %"
            for step in self.steps
            if step["label"] in self._retracting
        ]
        if shares:
            yield f"Retraction's share of a step: {', '.join(shares)}."
        growth = [f"{s['label']} {m[-1] / m[0]:.2f}" for s, m in self._measured()]
        first, last = self.part.depths[0], self.part.depths[-1]
        if growth:
            yield f"Activation memory at depth {last} as a multiple of that at depth {first}: {', '.join(growth)}."

    def _measured(self) -> list[tuple[dict[str, Any], Sequence[float]]]:
        """Return the rows whose memory is known."""
        pairs = zip(self.steps, self.memory, strict=True)
        return [(step, memory) for step, memory in pairs if not any(map(isnan, memory))]

    def plots(self) -> Plots:
        """Return what draws the phases of a step, and memory against depth."""
        return {
            f"{self.part.timed}, {self.device}, {self.part.threads} threads: where the time goes": self._draw_phases,
            f"width {self.part.small.width}, batch {self.part.small.batch}, {self.device}: memory against depth": (
                self._draw_memory
            ),
        }

    def _draw_phases(self, axes: Axes, styles: Styles) -> None:
        known = [Phases(*(0.0 if isnan(t) else 1e3 * t for t in self._phases(step))) for step in self.steps]
        parts = dict(zip(Phases._fields, zip(*known, strict=True), strict=True))
        draw_stacks(axes, [step["label"] for step in self.steps], parts)
        axes.set_xlabel("time of a step (ms)")
        axes.set_ylabel("engine")
        add_legend(axes)

    def _draw_memory(self, axes: Axes, styles: Styles) -> None:
        peaks = {step["label"]: [(peak / _MIB, nan, nan) for peak in memory] for step, memory in self._measured()}
        lines = {label: dict(zip(self.part.depths, bars, strict=True)) for label, bars in peaks.items()}
        draw_curves(axes, lines, styles)
        log_axis(axes, "peak activation memory (MiB)")
        count_axis(axes, self.part.depths, "hidden layers (count)")
        add_legend(axes)

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        baseline = self.steps[0]["label"]
        for step, memory in zip(self.steps, self.memory, strict=True):
            label, where = step["label"], str(self.part.timed)
            yield Fact.median(label, where, "step time", "s", Spread.recorded(step, "time"))
            yield Fact.median(label, where, "step time", f"× {baseline}", Spread.recorded(step, "ratio"))
            for name, seconds in zip(Phases._fields, self._phases(step), strict=True):
                yield Fact(label, where, f"time of {name}", "s", seconds)
            for depth, peak in zip(self.part.depths, memory, strict=True):
                where = str(replace(self.part.small, depth=depth))
                yield Fact(label, where, "peak activation memory", "MiB", peak / _MIB)


def _gradients(network: Network) -> float:
    """Return the MiB of the gradients of all weights and biases."""
    with torch.device("meta"):
        return sum(p.nbytes for p in network.create_model().parameters()) / _MIB
