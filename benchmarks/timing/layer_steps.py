"""What one training step of a plain chain of layers costs: its time, taken apart, and its activation memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isnan, nan
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import nn

from gradfree import create_model
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import Styles, add_legend, count_axis, draw_curves, draw_stacks, log_axis
from gradfree.benchmarks.tables.estimates import Spread
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.timing.memory import peak_memory
from gradfree.benchmarks.timing.speed import Timing, Turn, now
from gradfree.benchmarks.timing.trainee import Trainee
from gradfree.orthogonal.engine import OrthogonalEngine

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
class StepTiming(Timing[Callable[[], Phases]]):
    """Time of a training step with plain SGD, and of its phases."""

    kind: ClassVar[str] = "step"
    runs: ClassVar[int] = 16
    """A multiple of those from one retraction to the next."""
    network: Network

    @property
    def topic(self) -> str:
        """The network."""
        return str(self.network)

    def steps(self) -> Mapping[str, Callable[[], Callable[[], Phases]]]:
        """Return what builds the network in training with each row's engine."""
        return {row.label: partial(self._clocked, row) for row in self.rows}

    def turn(self, step: Callable[[], Phases]) -> Phases:
        """Take a step some times; return the means of its phases."""
        return Phases(*map(fmean, zip(*(step() for _ in range(self.runs)), strict=True)))

    def costs(self, step: Callable[[], Phases], turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the medians of the phases."""
        return {"phases": list(map(median, zip(*turns, strict=True)))}

    def _clocked(self, row: Row) -> Callable[[], Phases]:
        """Return a training step that returns how long its phases took."""
        trainee = _trainee(self.network, row, self.device, self.seed)
        updated = 0.0

        def note_update(*_: Any) -> None:
            nonlocal updated
            updated = now(self.device)

        def step() -> Phases:
            start = now(self.device)
            trainee.passes()
            passed = now(self.device)
            trainee.optimizer.step()
            return Phases(passed - start, updated - passed, now(self.device) - updated)

        # An optimizer's own hooks come before those for all optimizers, which is what engines retract by.
        trainee.optimizer.register_step_post_hook(note_update)
        return step


def _trainee(network: Network, row: Row, device: str, seed: int) -> Trainee:
    """Return a network in training with one row's engine."""
    torch.manual_seed(seed)
    model = network.create_model().to(device)
    inputs = torch.randn(network.batch, network.width).float().to(device)
    targets = torch.randint(_CLASSES, (network.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    row.create_engine().attach(model)
    return Trainee(model, optimizer, F.cross_entropy, inputs, targets)


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
        trainee = _trainee(network, self.row, self.device, self.seed)
        trainee.passes()  # What the engine keeps from pass to pass is there before.
        trainee.optimizer.zero_grad()
        return peak_memory(trainee.passes, self.device) - sum(p.nbytes for p in trainee.model.parameters())


@dataclass(frozen=True)
class StepCosts(Part):
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

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
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
class CostSection(Section):
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
            f"One step with plain SGD; medians and quartiles of {StepTiming.rounds} interleaved rounds of "
            f"{StepTiming.runs} steps, retractions included. Passes: forward and backward, or what stands for "
            f"it.{self._idle} Step: all three, as a multiple of the first row's. MiB: peak memory of the passes by "
            f"depth, with layers of {small.width} and batch {small.batch}, less the weights' gradients, "
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
