"""What one training step of a plain chain of layers costs: its time, taken apart, and its activation memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean, median
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from gradfree import create_model
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.benchmarks.timing.side_by_side import MIB, STEP, Timing, Timings, Trainee, Turn, now, time_of, times
from gradfree.orthogonal.engine import OrthogonalEngine

_CLASSES = 10
_LEARNING_RATE = 0.1
"""One that trains: weights drift, and are led back, as they would."""
_ACTIVATIONS, _RETRACTION, _IDLE = "peak activation memory", "retraction", "time of other rows' hooks"


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
    topic_field: ClassVar[str] = "network"
    runs: ClassVar[int] = 16
    """A multiple of those from one retraction to the next."""
    network: Network

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
        trainee = in_training(self.network, row, self.device, self.seed)
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


def in_training(network: Network, row: Row, device: str, seed: int) -> Trainee:
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
        trainee = in_training(network, self.row, self.device, self.seed)
        trainee.passes()  # What the engine keeps from pass to pass is there before.
        trainee.optimizer.zero_grad()
        return peak_memory(trainee.passes, self.device) - sum(p.nbytes for p in trainee.model.parameters())


@dataclass(frozen=True, kw_only=True)
class StepCosts(Timings[Network]):
    """Engines on chains of equal layers.

    Attributes:
        small: another network, of which memory is measured: many examples and narrow layers, so that weights count for
            little.
        depths: for memory, ascending.
    """

    small: Network
    depths: tuple[int, ...]

    timed = StepTiming

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the case that times all rows, then one on the memory of each."""
        yield from super().timing(device)
        networks = tuple(replace(self.small, depth=depth) for depth in self.depths)
        for row in self.rows:
            yield ActivationMemory(networks=networks, row=row, device=device, seed=0)

    def where(self, case: Case) -> dict[str, Any]:
        """Return the network that is timed, or the row whose memory is measured."""
        if isinstance(case, ActivationMemory):
            return {"setting": case.topic, "row": case.row.label, "series": case.row.series}
        return super().where(case)

    def told(self, case: Case, record: Record) -> Iterator[Fact]:
        """Yield the times and phases of all rows, or a row's memory by depth."""
        yield from super().told(case, record)
        for depth, peak in zip(self.depths, record["results"].get("activations", ()), strict=False):
            setting = str(replace(self.small, depth=depth))
            yield fact(_ACTIVATIONS, "MiB", peak / MIB, setting=setting, at=float(depth))

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield a row's time, and that of its phases."""
        yield from super().cost(cost, results)
        for phase, seconds in zip(Phases._fields, cost.get("phases", ()), strict=False):
            # In one process, each row's steps call the hooks of all.
            idle = phase == _RETRACTION and cost["label"] not in self._retracting
            yield fact(_IDLE if idle else time_of(phase), "s", seconds)

    @cached_property
    def _retracting(self) -> set[str]:
        """The labels of engines that retract."""
        return {row.label for row in self.rows if isinstance(row.create_engine(), OrthogonalEngine)}

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of a step's phases and of memory by depth, a row an engine."""
        (timed,), (baseline, *_) = self.subjects, (row.label for row in self.rows)
        ratios = estimates(facts, metric=STEP, unit=times(baseline))
        device = facts["device"][0]
        return Section(
            title=f"cost of a step: orthogonal_mlp, {timed}, device: {device}, threads: {self.threads}",
            facts=facts,
            columns=[
                *(column(f"{phase} (ms)", time_of(phase), "{value:.1f}", factor=1e3) for phase in Phases._fields),
                column("step (×)", STEP, unit=times(baseline)),
                column("quartiles", STEP, "{low:.2f}–{high:.2f}", times(baseline)),
                *(column(f"MiB at {depth}", _ACTIVATIONS, "{value:.1f}", at=depth) for depth in self.depths),
            ],
            legend=self._legend(facts),
            verdicts=[
                "the baseline" if label == baseline else verdict.speed(ratio, baseline)
                for label, ratio in ratios.items()
            ],
            remarks=[*self._remarks(facts), *self.failures(facts)],
            charts=[
                Chart(
                    f"width {self.small.width}, batch {self.small.batch}, {device}: memory against depth",
                    points(facts, "at", Figure(_ACTIVATIONS)),
                    Axis("hidden layers (count)", "counts"),
                    Axis("peak activation memory (MiB)", "log"),
                    True,
                ),
            ],
        )

    def _legend(self, facts: pl.DataFrame) -> str:
        """Say what the columns mean, and what stands where nothing is retracted."""
        idle = [hooks.value for hooks in estimates(facts, metric=_IDLE).values()]
        none = "–: the engine retracts nothing; other rows' hooks, {:.1f} ms at most, are in its step."
        small, deepest = self.small, self.depths[-1]
        return (
            f"One step with plain SGD; medians and quartiles of {StepTiming.rounds} interleaved rounds of "
            f"{StepTiming.runs} steps, retractions included. Passes: forward and backward, or what stands for it."
            f"{' ' + none.format(1e3 * max(idle)) if idle else ''} Step: all three, as a multiple of the first row's. "
            f"MiB: peak memory of the passes by depth, with layers of {small.width} and batch {small.batch}, "
            f"less the weights' gradients, {_gradients(replace(small, depth=deepest)):.1f} MiB at "
            f"{deepest} layers, which every engine leaves behind."
        )

    def _remarks(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield what part of a step retraction takes, and how memory grows with depth."""
        phases = [estimates(facts, metric=time_of(phase)) for phase in Phases._fields]
        shares = [
            f"{label} {100 * own.value / sum(phase[label].value for phase in phases):.0f} %"
            for label, own in phases[-1].items()
        ]
        if shares:
            yield f"Retraction's share of a step: {', '.join(shares)}."
        first, last = self.depths[0], self.depths[-1]
        small, large = (estimates(facts, metric=_ACTIVATIONS, at=depth) for depth in (first, last))
        growth = [f"{label} {large[label].value / own.value:.2f}" for label, own in small.items()]
        if growth:
            yield f"Activation memory at depth {last} as a multiple of that at depth {first}: {', '.join(growth)}."


def _gradients(network: Network) -> float:
    """Return the MiB of the gradients of all weights and biases."""
    with torch.device("meta"):
        return sum(p.nbytes for p in network.create_model().parameters()) / MIB
