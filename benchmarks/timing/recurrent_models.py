"""What a training step of a recurrent model costs: with torch's fused layers, as loops over cells, and by engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from gradfree import create_model
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend, draw_curves, draw_level, iterations_axis, log_axis
from gradfree.benchmarks.tables.estimates import Bar, Spread
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Plots, Section
from gradfree.benchmarks.tasks.catalogue import cross_entropy
from gradfree.benchmarks.timing.cell_loop import CellLoop, replace_layers
from gradfree.benchmarks.timing.speed import Errors, Timing, Turns
from gradfree.benchmarks.timing.trainee import Trainee

FUSED = "fused layer"
LOOP = "Python loop"
COMPILED = "compiled loop"


@dataclass(frozen=True)
class RecurrentModel:
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

    def inputs(self) -> Tensor:
        """Return random examples."""
        shape = (self.batch, *self.example)
        return torch.randint(self.classes, shape) if self._tokens else torch.randn(shape)

    def targets(self) -> Tensor:
        """Return random targets."""
        return torch.randint(self.classes, (self.batch, *(self.example if self._tokens else ())))

    @property
    def size(self) -> str:
        """The examples and the options, for people."""
        shape = " × ".join(map(str, self.example))
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.batch} examples of {shape}, {options}"

    @property
    def _tokens(self) -> bool:
        return len(self.example) == 1


@dataclass(frozen=True, kw_only=True)
class RecurrentStep(Timing[Trainee]):
    """Time of a whole training step, Adam included, of every row."""

    kind: ClassVar[str] = "recurrent step"
    runs: ClassVar[int] = 1
    """It is long."""
    net: RecurrentModel

    @property
    def topic(self) -> str:
        """The model."""
        return self.net.label

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
        inputs, targets = (examples.to(self.device) for examples in (self.net.inputs(), self.net.targets()))
        return Trainee(model, torch.optim.Adam(model.parameters()), cross_entropy, inputs, targets)


@dataclass(frozen=True)
class RecurrentSteps(Part):
    """Training steps of recurrent models.

    Attributes:
        nets: the models.
        rows: the engines.
        threads: for torch to use.
    """

    nets: tuple[RecurrentModel, ...]
    rows: tuple[Row, ...]
    threads: int

    def timing(self, device: str) -> Iterator[RecurrentStep]:
        """Yield one case a model."""
        for net in self.nets:
            yield RecurrentStep(net=net, rows=self.rows, threads=self.threads, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the models that were timed on ``device``."""
        results = {case.net.label: r["results"] for case in self.timing(device) for r in matching(records, case)}
        return RecurrentStepSection(self, results, device) if results else None


def time_column(label: str) -> str:
    """Return the heading of a model's times."""
    return f"{label} (ms)"


def gain_column(label: str) -> str:
    """Return the heading of a model's gains in speed."""
    return f"{label} (× faster)"


@dataclass(frozen=True)
class RecurrentStepSection(Section):
    """Times of training steps, and how many times faster than the Python loop they are."""

    part: RecurrentSteps
    results: Mapping[str, dict[str, Any]]
    device: str

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"training steps of recurrent models, device: {self.device}, threads: {self.part.threads}"

    @property
    def legend(self) -> str:
        """Say what the figures and sizes are."""
        sizes = "; ".join(f"{net.label}: {net.size}" for net in self.part.nets)
        return (
            f"Whole step with Adam, median of interleaved rounds; × faster: than the {LOOP} over torch's cell. "
            f"{FUSED}: torch's own module, cuDNN's or oneDNN's kernel where there is one; {COMPILED}: the loop over a "
            f"cell compiled by torch.compile. {sizes}."
        )

    @property
    def times(self) -> dict[str, dict[str, float]]:
        """Seconds by model and row."""
        return {net: {r["label"]: r["time"] for r in result["rows"]} for net, result in self.results.items()}

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row an engine."""
        yield ["row", *(heading for net in self.results for heading in (time_column(net), gain_column(net)))]
        for label in (FUSED, LOOP, COMPILED, *(row.label for row in self.part.rows)):
            cells = [label]
            for times in self.times.values():
                known = label in times
                cells += [f"{1e3 * times[label]:.1f}", f"{times[LOOP] / times[label]:.2f}"] if known else ["–", "–"]
            yield cells

    def remarks(self) -> Iterator[str]:
        """Yield what engines gain on the fused layer at best, and what did not run."""
        for net, times in self.times.items():
            engines = {row.label: times[row.label] for row in self.part.rows if row.label in times}
            best = min(engines, key=lambda label: engines[label])
            slower = ", ".join(label for label, time in engines.items() if time > times[FUSED])
            words = f"{net}: the fastest engine, {best}, takes {engines[best] / times[FUSED]:.2f} of the {FUSED}'s time"
            yield f"{words}; slower than it: {slower}." if slower else f"{words}."
        for net, result in self.results.items():
            for label, error in result["errors"].items():
                yield f"{net}, {label} did not run: {error}."

    def plots(self) -> Plots:
        """Return what draws each model's times against k, where there are several."""
        if len({row.iterations for row in self.part.rows} - {None}) < 2:
            return {}
        return {
            f"{net}, {self.device}, {self.part.threads} threads: time of a step against k": partial(self._draw, net=net)
            for net in self.results
        }

    def _draw(self, axes: Axes, styles: Styles, net: str) -> None:
        """Draw engines with iterations as lines, all else as levels."""
        bars = {row["label"]: (1e3 * Spread.recorded(row, "time")).bar for row in self.results[net]["rows"]}
        lines: defaultdict[str, dict[int, Bar]] = defaultdict(dict)
        for row in self.part.rows:
            if row.iterations is not None and row.label in bars:
                lines[row.series][row.iterations] = bars.pop(row.label)
        looks = styles((*bars, *lines))
        draw_curves(axes, lines, styles)
        for label, (time, _, _) in bars.items():
            draw_level(axes, time, label, looks[label])
        iterations_axis(axes, [k for line in lines.values() for k in line])
        log_axis(axes, "time of a step (ms)")
        add_legend(axes)
