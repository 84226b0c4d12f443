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
from torch.utils.benchmark import set_torch_threads

from gradfree import create_model
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend, draw_curves, draw_level, iterations_axis, log_axis
from gradfree.benchmarks.tables.experiment import Experiment, matching
from gradfree.benchmarks.tables.printed import Bar, Plots, PrintedSection, Spread
from gradfree.benchmarks.tasks.catalogue import cross_entropy
from gradfree.benchmarks.timing.speed import Timing, compared, interleaved

FUSED = "fused layer"
LOOP = "Python loop"
COMPILED = "compiled loop"

_CELLS: dict[str, type[nn.GRUCell] | type[nn.LSTMCell] | type[nn.RNNCell]] = {
    "GRU": nn.GRUCell,
    "LSTM": nn.LSTMCell,
    "RNN_TANH": nn.RNNCell,
}
_RUNS = 1
"""Of a step in a round: it is long."""


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


class CellLoop(nn.Module):
    """A fused recurrent layer's stand-in: the same computation as a Python loop over torch's cell."""

    def __init__(self, layer: nn.RNNBase, compiled: bool):
        super().__init__()
        cell = _CELLS[layer.mode](layer.input_size, layer.hidden_size).to(next(layer.parameters()).device)
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
        # Not Module.compile: of torch's own modules it compiles nothing, without a word.
        self.cell = torch.compile(cell) if compiled else cell

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs (B, T, H) for inputs ``x`` (B, T, I), and the final states (parts, B, H)."""
        parts = None if state is None else tuple(state)
        outputs = []
        for step in x.unbind(1):
            h = self.cell(step, parts if parts is None or len(parts) > 1 else parts[0])
            parts = h if isinstance(h, tuple) else (h,)
            outputs.append(parts[0])
        return torch.stack(outputs, 1), torch.stack(parts or ())


@dataclass(frozen=True, kw_only=True)
class RecurrentStep(Timing):
    """Time of a whole training step, Adam included, of every row in turns."""

    kind: ClassVar[str] = "recurrent step"
    net: RecurrentModel

    @property
    def topic(self) -> str:
        """The model."""
        return self.net.label

    def run(self) -> dict[str, Any]:
        """Measure; return for each row its times in seconds and ratios to the fused layer's, or its error."""
        steps: dict[str, Callable[[], object]] = {FUSED: _Trainee(self).step, LOOP: self._loop(False)}
        steps |= {row.label: _Trainee(self, row).step for row in self.rows}
        errors = {}
        compiled = self._loop(True)
        with set_torch_threads(self.threads):
            try:
                compiled()
                steps[COMPILED] = compiled
            except Exception as error:  # No compiler is a finding, and no reason to lose the other rows.
                errors[COMPILED] = f"{type(error).__name__}: {error}".splitlines()[0]
            times = interleaved(list(steps.values()), _RUNS)
        return {"rows": compared(steps, times), "errors": errors}

    def _loop(self, compiled: bool) -> Callable[[], object]:
        trainee = _Trainee(self, loop=lambda layer: CellLoop(layer, compiled))
        return trainee.step


class _Trainee:
    """A model in training on one batch, as it is, with an engine, or with loops in place of fused layers."""

    def __init__(
        self, case: RecurrentStep, row: Row | None = None, loop: Callable[[nn.RNNBase], nn.Module] | None = None
    ):
        torch.manual_seed(case.seed)
        self.model = create_model(case.net.model, **case.net.options).to(case.device)
        if loop is not None:
            replace_layers(self.model, loop)
        if row is not None:
            row.create_engine().attach(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.inputs, self.targets = case.net.inputs().to(case.device), case.net.targets().to(case.device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()


def replace_layers(model: nn.Module, loop: Callable[[nn.RNNBase], nn.Module]) -> None:
    """Put what ``loop`` returns in the place of each of the model's fused recurrent layers."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.RNNBase):
            model.set_submodule(path, loop(layer))


@dataclass(frozen=True)
class RecurrentSteps(Experiment):
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

    def printed(self, records: Mapping[str, Record], device: str) -> PrintedSection | None:
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
class RecurrentStepSection(PrintedSection):
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
