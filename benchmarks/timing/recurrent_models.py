"""What a training step of a recurrent model costs: with torch's fused layers, as loops over cells, and by engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from gradfree import create_model
from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.data.synthetic import random_examples
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.chart import ITERATIONS, Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.benchmarks.timing.recurrent_layers import COMPILED, CellLoop, replace_layers
from gradfree.benchmarks.timing.side_by_side import STEP, Errors, Timing, Timings, Trainee, Turns, times

FUSED = "fused layer"
LOOP = "Python loop"
_SPEED = "speed"


@dataclass(frozen=True)
class RecurrentNet:
    """A model with a batch of random examples.

    Attributes:
        label: for people.
        model: name of a registered model.
        options: of the model.
        batch: number of examples.
        example: shape of one: (T,) tokens, or the (C, H, W) of an image.
        classes: of the targets: one for each token, or for each image.
    """

    label: str
    model: str
    options: Mapping[str, Any]
    batch: int
    example: tuple[int, ...]
    classes: int

    def __str__(self) -> str:
        return self.label

    def examples(self) -> Split:
        """Return random inputs and targets."""
        return random_examples((self.batch, *self.example), self.classes, tokens=len(self.example) == 1)

    @property
    def size(self) -> str:
        """The examples and the options, for people."""
        shape = " × ".join(map(str, self.example))
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.batch} examples of {shape}, {options}"


@dataclass(frozen=True, kw_only=True)
class RecurrentStep(Timing[Trainee]):
    """Time of a whole training step, Adam included, of every row."""

    kind: ClassVar[str] = "recurrent step"
    topic_field: ClassVar[str] = "net"
    runs: ClassVar[int] = 1
    """It is long."""
    net: RecurrentNet

    def steps(self) -> Mapping[str, Callable[[], Trainee]]:
        """Return what builds the model in training: as it is, with loops in place of fused layers, with engines."""
        loops = {LOOP: partial(self._trainee, loop=CellLoop)}
        loops[COMPILED] = partial(self._trainee, loop=partial(CellLoop, compiled=True))
        return {FUSED: self._trainee, **loops, **{row.label: partial(self._trainee, row) for row in self.rows}}

    def results(self, steps: Mapping[str, Trainee], turns: Turns, errors: Errors) -> dict[str, Any]:
        """Return the rows that could be timed, and what others, such as those without a compiler, failed with."""
        told = {label: next(error.format_exception_only()).splitlines()[0] for label, error in errors.items()}
        return {**super().results(steps, turns, {}), "errors": told}

    def _trainee(self, row: Row | None = None, loop: Callable[[nn.RNNBase], nn.Module] | None = None) -> Trainee:
        torch.manual_seed(self.seed)
        model = create_model(self.net.model, **self.net.options).to(self.device)
        if loop is not None:
            replace_layers(model, loop)
        if row is not None:
            row.create_engine().attach(model)
        inputs, targets = (examples.to(self.device) for examples in self.net.examples())
        return Trainee(model, torch.optim.Adam(model.parameters()), cross_entropy, inputs, targets)


@dataclass(frozen=True)
class RecurrentSteps(Timings[RecurrentNet]):
    """Training steps of recurrent models."""

    timed = RecurrentStep

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return what each row takes, the loops before the engines."""
        labels = (FUSED, LOOP, COMPILED, *(row.label for row in self.rows))
        order = pl.col("row").replace_strict(labels, range(len(labels)), default=None, return_dtype=pl.Int64)
        return super().facts(records, device).sort(order, maintain_order=True)

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes, and how many times faster than the Python loop it is."""
        yield from super().cost(cost, results)
        for loop in results["rows"]:
            if loop["label"] == LOOP:
                yield fact(_SPEED, times(LOOP), loop["time"] / cost["time"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of times and gains, a row an engine."""
        device = facts["device"][0]
        nets = [net for net in self.subjects if net.label in set(facts["setting"])]
        several = len({row.iterations for row in self.rows} - {None}) > 1
        return Section(
            title=f"training steps of recurrent models, device: {device}, threads: {self.threads}",
            facts=facts,
            names={"row": "row"},
            columns=[
                one
                for net in nets
                for one in (
                    column(time_column(net.label), STEP, "{value:.1f}", "s", factor=1e3, setting=net.label),
                    column(gain_column(net.label), _SPEED, unit=times(LOOP), setting=net.label),
                )
            ],
            legend=f"Whole step with Adam, median of interleaved rounds; × faster: than the {LOOP} over torch's cell. "
            f"{FUSED}: torch's own module, cuDNN's or oneDNN's kernel where there is one; {COMPILED}: the loop over a "
            f"cell compiled by torch.compile. {'; '.join(f'{net.label}: {net.size}' for net in self.subjects)}.",
            remarks=[*(told for net in nets for told in self._best(facts, net.label)), *self.failures(facts)],
            charts=[
                Chart(
                    f"{net.label}, {device}, {self.threads} threads: time of a step against k",
                    points(facts.filter(pl.col("setting") == net.label), "k", Figure(STEP, unit="s", factor=1e3)),
                    ITERATIONS,
                    Axis("time of a step (ms)", "log"),
                    True,
                )
                for net in (nets if several else ())
            ],
        )

    def _best(self, facts: pl.DataFrame, net: str) -> Iterator[str]:
        """Yield what engines gain on the fused layer at best."""
        known = {row: time.value for row, time in estimates(facts, metric=STEP, unit="s", setting=net).items()}
        engines = {row.label: known[row.label] for row in self.rows if row.label in known}
        if engines:
            best = min(engines, key=lambda label: engines[label])
            slower = ", ".join(label for label, time in engines.items() if time > known[FUSED])
            words = f"{net}: the fastest engine, {best}, takes {engines[best] / known[FUSED]:.2f} of the {FUSED}'s time"
            yield f"{words}; slower than it: {slower}." if slower else f"{words}."


def time_column(label: str) -> str:
    """Return the heading of a model's times."""
    return f"{label} (ms)"


def gain_column(label: str) -> str:
    """Return the heading of a model's gains in speed."""
    return f"{label} (× faster)"
