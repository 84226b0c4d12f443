"""The map of memory: a training step's time against its peak memory by depth, of engines and activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isqrt
from time import process_time
from typing import Any, ClassVar

from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import estimates, pareto_front
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.layer_steps import Network, in_training
from gradfree.benchmarks.timing.side_by_side import MEMORY, STEP, Timing, Timings, Trainee, Turn, clocked, times

_LAYERS = 200
"""How many layers the steps of a turn run through, all together: so few are more than one step."""

EACH, SEGMENTS = "each block", "√L segments"


@dataclass(frozen=True)
class Checkpointed(Row):
    """An engine on a network that keeps inputs of some layers alone, and runs the others again: torch's checkpoints.

    Attributes:
        kept: "each block", a layer with its activation function, or "√L segments" of such blocks.
    """

    kept: str


def run_again(layers: nn.Sequential, blocks: Sequence[nn.Module], segments: int) -> None:
    """Let ``layers`` keep what enters each of so many segments of ``blocks``, and run these in the backward pass."""
    run = partial(checkpoint_sequential, blocks, segments, use_reentrant=False)
    object.__setattr__(layers, "forward", lambda x: run(input=x))


@dataclass(frozen=True, kw_only=True)
class MemoryStep(Timing[Trainee]):
    """Time and peak memory of a training step with plain SGD, by row."""

    kind: ClassVar[str] = "memory step"
    weighed: ClassVar[bool] = True
    topic_field: ClassVar[str] = "network"
    rounds: ClassVar[int] = 3
    network: Network

    def steps(self) -> Mapping[str, Callable[[], Trainee]]:
        """Return what builds the network in training, by row."""
        return {row.label: partial(self._trainee, row) for row in self.rows}

    def turn(self, step: Trainee) -> Turn:
        """Take some steps; return the mean: on a CPU of the processor's time, which nothing beside them takes."""
        runs = max(1, _LAYERS // self.network.depth)
        if self.device != "cpu":
            return (clocked(step, runs),)
        start = process_time()
        for _ in range(runs):
            step()
        return ((process_time() - start) / runs,)

    def _trainee(self, row: Row) -> Trainee:
        found = in_training(self.network, row, self.device, self.seed)
        if isinstance(row, Checkpointed):
            layers: Any = found.model.layers
            blocks = [layers[i : i + 2] for i in range(0, len(layers), 2)]
            run_again(layers, blocks, len(blocks) if row.kept == EACH else isqrt(self.network.depth))
        return found


@dataclass(frozen=True)
class MemoryMap(Timings[Network]):
    """Engines and checkpoints on networks that differ in depth."""

    timed = MemoryStep

    def where(self, case: Case) -> dict[str, Any]:
        """Return the network, and its depth."""
        return {"setting": case.topic, "at": float(case.about.depth)}

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table, a row an engine, with time and memory by depth, and for each depth the chart of both."""
        found = {network: self._front(facts, network) for network in self.subjects}
        fronts = {network: front for network, front in found.items() if front}
        network, device = self.subjects[0], facts["device"][0]
        listed = [
            f"Pareto front at {n.depth} layers, the leanest first: {', '.join(front)}." for n, front in fronts.items()
        ]
        return Section(
            title=f"time against memory, orthogonal_mlp of width {network.width}, batch {network.batch}, device: "
            f"{device}, threads: {self.threads}",
            facts=facts,
            columns=[
                told
                for network in fronts
                for told in (
                    column(f"step at {network.depth} (×)", STEP, unit=self._times, at=float(network.depth)),
                    column(f"MiB at {network.depth}", MEMORY, "{value:.1f}", "MiB", at=float(network.depth)),
                )
            ],
            legend=self._legend(facts),
            verdicts=[self._verdict(label, fronts) for label in facts["row"].drop_nulls().unique(maintain_order=True)],
            remarks=[*listed, *self.failures(facts)],
            charts=[self._chart(facts, network, front) for network, front in fronts.items()],
        )

    @cached_property
    def _times(self) -> str:
        return times(self.rows[0].label)

    def _legend(self, facts: pl.DataFrame) -> str:
        told = []
        for network in self.subjects:
            seconds = estimates(facts, metric=STEP, unit="s", at=float(network.depth)).get(self.rows[0].label)
            if seconds:
                told.append(f"{1e3 * seconds.value:.0f} ms at {network.depth}")
        return (
            "One step with plain SGD by number of hidden layers, as a multiple of the first row's in the same round "
            f"({', '.join(told)}), medians of {MemoryStep.rounds} interleaved rounds, of the processor's time. "
            "MiB: peak memory of the step, gradients included, weights not. Checkpoints are those of "
            "torch.utils.checkpoint, not reentrant: of each layer with its activation function, or of √L runs of such "
            "blocks, the last of which is stored."
        )

    def _front(self, facts: pl.DataFrame, network: Network) -> list[str]:
        """Return the rows that are shown to be faster than all that take less memory, the leanest first."""
        at = float(network.depth)
        times = estimates(facts, metric=STEP, unit=self._times, at=at)
        memory = estimates(facts, metric=MEMORY, unit="MiB", at=at)
        return pareto_front(memory, lambda row, other: times[row].high < times[other].low)

    def _verdict(self, label: str, fronts: Mapping[Network, Sequence[str]]) -> str:
        on = [str(network.depth) for network, front in fronts.items() if label in front]
        return f"on the Pareto front at {', '.join(on)} layers" if on else "not on the Pareto front"

    def _chart(self, facts: pl.DataFrame, network: Network, front: Sequence[str]) -> Chart:
        own = facts.filter(pl.col("at") == float(network.depth))
        found = points(own, Figure(MEMORY, unit="MiB"), Figure(STEP, unit=self._times), "row")
        return Chart(
            f"{network}, {facts['device'][0]}, {self.threads} threads",
            found.with_columns(ringed=pl.col("row").is_in(front)),
            Axis("peak memory of a step (MiB)", "log"),
            Axis(f"step time, as a multiple of {self.rows[0].label}'s (×)"),
            ringed="Pareto front",
        )
