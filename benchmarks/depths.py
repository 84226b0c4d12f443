"""How well engines train networks of several depths, and how well their gradients point layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from gradfree.benchmarks.case import Case, Row
from gradfree.benchmarks.comparison import Comparison
from gradfree.benchmarks.layerwise import LayerwiseTraining
from gradfree.benchmarks.part import Part, matching
from gradfree.benchmarks.records import Record
from gradfree.benchmarks.section import Section
from gradfree.benchmarks.stored import Stored
from gradfree.benchmarks.summary import Estimate
from gradfree.benchmarks.tasks import Task


class _Layerwise(Comparison):
    """Engines on one task, looked at layer by layer and not timed."""

    trained = LayerwiseTraining

    def timing(self, device: str) -> Iterator[Case]:
        """Yield nothing."""
        return iter(())


@dataclass(frozen=True)
class DepthSweep(Part):
    """Engines on one task at several depths.

    Attributes:
        task: what is trained.
        depths: the options of the task's model by its number of hidden layers, ascending.
        rows: the engines. The first is the baseline of the others.
        learning_rates: ascending; each row has, at each depth, the one that does best on validation data.
    """

    task: Task
    depths: Mapping[int, Mapping[str, Any]]
    rows: tuple[Row, ...]
    learning_rates: tuple[float, ...]

    @property
    def comparisons(self) -> dict[int, Comparison]:
        """The engines by depth."""
        tasks = {
            depth: replace(self.task, name=f"{self.task.name}_{depth}", options={**self.task.options, **options})
            for depth, options in self.depths.items()
        }
        return {depth: _Layerwise(task, self.rows, self.learning_rates) for depth, task in tasks.items()}

    @property
    def optional(self) -> bool:
        """Whether the data are stored ones."""
        return isinstance(self.task.data, Stored)

    @property
    def tries(self) -> int:
        """How many trials each training run waits for."""
        return len(self.learning_rates)

    def check(self) -> None:
        """Raise a UsageError if the data are not there."""
        Comparison(self.task, self.rows).check()

    def trials(self, device: str) -> Iterator[Case]:
        """Yield a run of each row at each depth and learning rate."""
        for comparison in self.comparisons.values():
            yield from comparison.trials(device)

    def training(self, seed: int, device: str, records: Mapping[str, Record]) -> Iterator[Case | None]:
        """Yield one training run of each row at each depth; ``None`` where the learning rate is yet to be chosen."""
        for comparison in self.comparisons.values():
            yield from comparison.training(seed, device, records)

    def timing(self, device: str) -> Iterator[Case]:
        """Yield nothing."""
        return iter(())

    def section(self, records: Mapping[str, Record], device: str) -> DepthSection | None:
        """Return the figures of the runs on ``device``."""
        curves = self.curves(records, device)
        if not any(point.seeds for points in curves.values() for point in points):
            return None
        return DepthSection(self, curves, device)

    def curves(self, records: Mapping[str, Record], device: str) -> dict[str, list[Point]]:
        """Return what is known of each row, by its label, at all depths."""
        curves: dict[str, list[Point]] = {row.label: [] for row in self.rows}
        for comparison in self.comparisons.values():
            for row, case in zip(self.rows, comparison.training(0, device, records), strict=True):
                found = [record["results"] for record in matching(records, case)] if case else []
                curves[row.label].append(Point.of(found, case.task.learning_rate if case else nan))
        return curves


@dataclass(frozen=True)
class Point:
    """What is known of one engine at one depth; NaN where no record tells.

    Attributes:
        seeds: number of training runs.
        learning_rate: of all of them.
        test: score.
        validation: score.
        drift: the weights' largest seen in any run.
        alignment: each layer's cosine with the true gradient, mean over the runs, by training step.
    """

    seeds: int
    learning_rate: float
    test: Estimate
    validation: Estimate
    drift: float
    alignment: Mapping[int, Sequence[float]]

    @classmethod
    def of(cls, results: Sequence[dict[str, Any]], learning_rate: float) -> Point:
        """Put the results of some runs together."""
        probes = [[probe["layers"] for probe in result["fidelity"]] for result in results]
        steps = [probe["step"] for probe in results[0]["fidelity"]] if results else []
        return cls(
            seeds=len(results),
            learning_rate=learning_rate,
            test=Estimate.of([result["test"] for result in results]),
            validation=Estimate.of([result["validation"] for result in results]),
            drift=max((loss["drift"] for result in results for loss in result["losses"]), default=nan),
            alignment=dict(zip(steps, np.mean(probes, axis=0).tolist(), strict=True)) if results else {},
        )

    @property
    def cosine(self) -> float:
        """The mean alignment of the hidden layers over the training."""
        cosines = [cosine for layers in self.alignment.values() for cosine in layers[:-1]]
        return fmean(cosines) if cosines else nan


@dataclass(frozen=True)
class DepthSection(Section):
    """Scores and alignment of engines at several depths."""

    part: DepthSweep
    curves: Mapping[str, Sequence[Point]]
    device: str

    @property
    def title(self) -> str:
        """Say what was compared."""
        task, seeds = self.part.task, max(point.seeds for points in self.curves.values() for point in points)
        options = ", ".join(
            f"{name} {value}" for name, value in task.options.items() if name in ("width", "activation")
        )
        model = f"{task.model} ({options})" if options else task.model
        return f"{task.name}: {model} by depth, {task.steps} steps, seeds: {seeds}, device: {self.device}"

    @property
    def legend(self) -> str:
        """Say what the signs and columns mean."""
        score, rates = self.part.task.score, ", ".join(f"{rate:g}" for rate in self.part.learning_rates)
        return (
            f"Columns: hidden layers. Test {score.name} ({score.unit}) ± sample standard deviation over seeds, and in "
            "brackets the cosine between each hidden layer's gradient and the true one at the same weights, mean over "
            f"layers and training. Learning rates: of {rates}, for each engine and depth the one that did best on "
            "validation data, with another seed."
        )

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row an engine."""
        yield ["engine", *map(str, self.part.depths)]
        for label, points in self.curves.items():
            yield [label, *(self.cell(point).replace("nan", "–") for point in points)]

    def cell(self, point: Point) -> str:
        """Return the figures of one engine at one depth."""
        return f"{point.test} [{point.cosine:.2f}]"

    def remarks(self) -> Iterator[str]:
        """Yield each engine's distance to the baseline, and where a learning rate beyond the grid may be better."""
        for row in self.part.rows:
            reference = self._reference(row)
            gains = ", ".join(self._gains(row, reference))
            if gains and reference != row:
                name = self.part.task.score.name
                yield f"{row.label} against {reference.label}, test {name} by depth: {gains}."
        lowest, *_, highest = self.part.learning_rates
        edge = [
            f"{label} at {depth} ({point.learning_rate:g})"
            for label, points in self.curves.items()
            for depth, point in zip(self.part.depths, points, strict=True)
            if point.learning_rate in (lowest, highest)
        ]
        if edge:
            yield f"Best at the edge of the learning rates, maybe better beyond: {', '.join(edge)}."

    def _reference(self, row: Row) -> Row:
        """Return the baseline or, if there is one with the row's own options, that."""
        baseline, *others = self.part.rows
        same = (r for r in others if (r.engine, r.options) == (baseline.engine, row.options))
        return next(same, baseline)

    def _gains(self, row: Row, reference: Row) -> Iterator[str]:
        goodness = self.part.task.score.goodness
        curves = self.curves[row.label], self.curves[reference.label]
        for depth, own, exact in zip(self.part.depths, *curves, strict=True):
            if own.seeds and exact.seeds:
                yield f"{depth}: {goodness(own.test.mean) - goodness(exact.test.mean):+.2f}"

    def draw(self, top: Axes, bottom: Axes) -> None:
        """Draw the score against the depth, and the alignment layer by layer of the deepest network."""
        activation = self.part.task.options.get("activation", "tanh")
        top.set_title(f"{self.part.task.name}, {self.part.task.model}, {activation}, {self.device}")
        _draw_scores(top, self)
        _draw_alignment(bottom, self)


def _draw_scores(axes: Axes, section: DepthSection) -> None:
    for label, points in section.curves.items():
        means, spreads = [p.test.mean for p in points], [p.test.spread for p in points]
        axes.errorbar(list(section.part.depths), means, spreads, fmt="o-", capsize=3, label=label)
    score = section.part.task.score
    axes.set_xscale("log")
    axes.set_xticks(list(section.part.depths), [str(depth) for depth in list(section.part.depths)])
    axes.minorticks_off()
    axes.set_xlabel("hidden layers")
    axes.set_ylabel(f"test {score.name} ({score.unit})")
    axes.legend(fontsize="small")


def _draw_alignment(axes: Axes, section: DepthSection) -> None:
    """Draw the first engine that is not exact over the training, of the others the end alone."""
    deepest = {label: points[-1] for label, points in section.curves.items()}
    inexact = {label: point for label, point in deepest.items() if point.cosine < 1 - 1e-3}
    followed = next(iter(inexact), None)
    for n, (label, point) in enumerate(deepest.items()):
        if label == followed:
            for color, (step, layers) in zip(_shades(len(point.alignment)), point.alignment.items(), strict=True):
                axes.plot(range(1, len(layers) + 1), layers, color=color, label=f"{label}, step {step}")
        elif label in inexact:
            *_, layers = point.alignment.values()
            axes.plot(range(1, len(layers) + 1), layers, "--", color=f"C{n}", label=f"{label}, last step")
    axes.set_xlabel(f"layer, of {list(section.part.depths)[-1]} hidden ones and the output")
    axes.set_ylabel("cosine with the true gradient")
    axes.set_ylim(-0.3, 1.05)
    axes.axhline(0.0, color="0.7", zorder=0)
    if inexact:
        axes.legend(fontsize="x-small", ncols=2)


def _shades(count: int) -> list[Any]:
    return [colormaps["viridis"](n / max(1, count - 1)) for n in range(count)]
