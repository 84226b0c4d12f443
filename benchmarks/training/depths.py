"""How well engines train networks of several depths, and how well their gradients point layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gradfree.benchmarks.data.stored import Stored
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.drawing import Styles, add_legend, count_axis, draw_curves, draw_rows, score_axis
from gradfree.benchmarks.tables.estimates import Estimate, paired
from gradfree.benchmarks.tables.experiment import Part, outcomes
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.layerwise import LayerwiseTraining
from gradfree.benchmarks.training.training import score_in

_MARKS = 10
"""On a line of many points, at most."""


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
                found = list(outcomes(records, case)) if case else []
                curves[row.label].append(Point.of(found, case.task.learning_rate if case else nan))
        return curves


@dataclass(frozen=True)
class Point:
    """What is known of one engine at one depth; NaN where no record tells.

    Attributes:
        learning_rate: of all training runs.
        test: score by seed.
        validation: score by seed.
        drift: the weights' largest seen in any run.
        alignment: each layer's cosine with the true gradient, mean over the runs, by training step.
        failed: number of runs without results.
    """

    learning_rate: float
    test: Mapping[int, float]
    validation: Mapping[int, float]
    drift: float
    alignment: Mapping[int, Sequence[float]]
    failed: int

    @classmethod
    def of(cls, records: Sequence[Record], learning_rate: float) -> Point:
        """Put some runs together."""
        results = {record["seeds"][0]: record["results"] for record in records if not error_of(record)}
        probes = [[probe["layers"] for probe in result["fidelity"]] for result in results.values()]
        steps = [probe["step"] for probe in next(iter(results.values()))["fidelity"]] if results else []
        return cls(
            learning_rate=learning_rate,
            test={seed: score_in(result, "test") for seed, result in results.items()},
            validation={seed: score_in(result, "validation") for seed, result in results.items()},
            drift=max((loss["drift"] for result in results.values() for loss in result["losses"]), default=nan),
            alignment=dict(zip(steps, np.mean(probes, axis=0).tolist(), strict=True)) if results else {},
            failed=len(records) - len(results),
        )

    @property
    def seeds(self) -> int:
        """The number of training runs."""
        return len(self.test) + self.failed

    @property
    def score(self) -> Estimate:
        """The test score."""
        return Estimate.of(list(self.test.values()))

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
    bracket: ClassVar[str] = (
        "the cosine between each hidden layer's gradient and the true one at the same weights, mean over layers and "
        "training"
    )

    @property
    def title(self) -> str:
        """Say what was compared."""
        task = self.part.task
        options = ", ".join(
            f"{name} {value}" for name, value in task.options.items() if name in ("width", "activation")
        )
        model = f"{task.model} ({options})" if options else task.model
        return f"{task.name}: {model} by depth, {task.steps} steps, seeds: {self.seeds}, device: {self.device}"

    @property
    def seeds(self) -> int:
        """The number of training runs of an engine at a depth, at most."""
        return max(point.seeds for points in self.curves.values() for point in points)

    @property
    def legend(self) -> str:
        """Say what the signs and columns mean."""
        score, rates = self.part.task.score, ", ".join(f"{rate:g}" for rate in self.part.learning_rates)
        return (
            f"Columns: hidden layers. Test {score.name} ({score.unit}) ± 95 % confidence interval of the mean over "
            f"seeds (Student's t, n = {self.seeds}), and in brackets {self.bracket}. In words: differences in test "
            f"{score.name}, seed by seed, with the same interval. Learning rates: of {rates}, for each engine and "
            "depth the one that did best on validation data, with another seed."
        )

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row an engine."""
        yield ["engine", *map(str, self.part.depths)]
        for label, points in self.curves.items():
            yield [label, *(self.cell(point).replace("nan", "–") for point in points)]

    def cell(self, point: Point) -> str:
        """Return the figures of one engine at one depth."""
        if point.failed and not point.test:
            return "failed"
        if point.test and isnan(point.score.mean):
            return "diverged"
        return f"{point.score} [{self.bracketed(point)}]"

    def bracketed(self, point: Point) -> str:
        """Return what stands in brackets."""
        return f"{point.cosine:.2f}"

    def scores(self, column: str) -> Mapping[str, Mapping[int, float]]:
        """Return the test scores at one depth by row and seed."""
        return {
            label: point.test
            for label, points in self.curves.items()
            for depth, point in zip(self.part.depths, points, strict=True)
            if str(depth) == column
        }

    def verdicts(self) -> list[str]:
        """Return each engine's distance to the baseline, in words."""
        return [self._verdict(row) for row in self.part.rows]

    def _verdict(self, row: Row) -> str:
        reference, score = self._reference(row), self.part.task.score
        if reference == row:
            return "the baseline"
        depths: defaultdict[str, list[str]] = defaultdict(list)
        for depth, difference in self._differences(row).items():
            outcome, figures = verdict.change(difference, bool(score.metric().higher_is_better))
            told = figures and outcome != verdict.SAME
            depths[outcome].append(f"{depth} ({figures})" if told else str(depth))
        outcomes = "; ".join(f"{outcome} at {', '.join(found)}" for outcome, found in depths.items())
        return f"{score.name} beside {reference.label}: {outcomes or 'not compared'}"

    def _differences(self, row: Row) -> dict[int, Estimate]:
        """Return by depth how much more than its reference's the row's test score is."""
        curves = self.curves[row.label], self.curves[self._reference(row).label]
        differences = {
            depth: paired(own.test, exact.test) for depth, own, exact in zip(self.part.depths, *curves, strict=True)
        }
        return {depth: difference for depth, difference in differences.items() if difference.count}

    def _reference(self, row: Row) -> Row:
        """Return the baseline or, if another row is its engine with the row's own options, that."""
        baseline, *others = self.part.rows
        same = (r for r in others if r != row and (r.engine, r.options) == (baseline.engine, row.options))
        return next(same, baseline)

    def remarks(self) -> Iterator[str]:
        """Yield where a learning rate beyond the grid may be better."""
        lowest, *_, highest = self.part.learning_rates
        edge = [
            f"{label} at {depth} ({point.learning_rate:g})"
            for label, points in self.curves.items()
            for depth, point in zip(self.part.depths, points, strict=True)
            if point.learning_rate in (lowest, highest)
        ]
        if edge:
            yield f"Best at the edge of the learning rates, maybe better beyond: {', '.join(edge)}."

    def plots(self) -> Plots:
        """Return what draws the score against the depth, and the alignment layer by layer of the deepest network."""
        activation = self.part.task.options.get("activation", "tanh")
        where = f"{self.part.task.name} ({activation}), {self.device}"
        score, (first, *more) = self.part.task.score.name, self.part.depths
        scores: Plots = (
            {f"{where}: {score} against depth": self._draw_scores}
            if more
            else {f"{where}: {score} with {first} hidden layers": self._draw_scores_of_one}
        )
        return {
            **scores,
            f"{where}: gradients layer by layer": self._draw_alignment,
        }

    def _draw_scores(self, axes: Axes, styles: Styles) -> None:
        scores = {label: [point.score.bar for point in points] for label, points in self.curves.items()}
        lines = {label: dict(zip(self.part.depths, bars, strict=True)) for label, bars in scores.items()}
        draw_curves(axes, lines, styles)
        score_axis(axes, "test", self.part.task.score)
        count_axis(axes, list(self.part.depths), "hidden layers (count)")
        add_legend(axes)

    def _draw_scores_of_one(self, axes: Axes, styles: Styles) -> None:
        draw_rows(axes, {label: point.score.bar for label, (point,) in self.curves.items()}, "engine", styles)
        score_axis(axes, "test", self.part.task.score)

    def _draw_alignment(self, axes: Axes, styles: Styles) -> None:
        """Draw the first engine that is not exact over the training, of the others the end alone."""
        deepest = {label: points[-1] for label, points in self.curves.items()}
        inexact = {label: point for label, point in deepest.items() if point.cosine < 1 - 1e-3}
        followed = next(iter(inexact), None)
        looks = styles(inexact)
        for label, point in inexact.items():
            *earlier, (last, cosines) = point.alignment.items()
            layers, color = range(1, len(cosines) + 1), looks[label]["color"]
            for n, (step, before) in enumerate(earlier if label == followed else (), 1):
                axes.plot(
                    layers, before, color=color, alpha=(n + 1) / (len(earlier) + 2), label=f"{label}, step {step}"
                )
            every = -(-len(cosines) // _MARKS)
            axes.plot(layers, cosines, **looks[label], markevery=every, label=f"{label}, step {last}")
        axes.set_xlabel(f"layer, of {list(self.part.depths)[-1]} hidden ones and the output (number)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("cosine with the true gradient")
        axes.set_ylim(min(-0.3, axes.get_ylim()[0]), 1.05)
        axes.axhline(0.0, color="0.7", zorder=0)
        add_legend(axes)

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        score = self.part.task.score
        for label, points in self.curves.items():
            for depth, point in zip(self.part.depths, points, strict=True):
                where = f"{depth} hidden layers"
                validation = Estimate.of(list(point.validation.values()))
                yield Fact.mean(label, where, f"test {score.name}", score.unit, point.score)
                yield Fact.mean(label, where, f"validation {score.name}", score.unit, validation)
                seeds = len(point.test)
                yield Fact(label, where, "cosine with the exact gradient", "1", point.cosine, seeds=seeds)
                yield Fact(label, where, "largest drift from orthogonality", "1", point.drift, seeds=seeds)
                yield Fact(label, where, "learning rate", "1", point.learning_rate)
                yield Fact(label, where, "failed runs", "1", point.failed)
        for row in self.part.rows:
            quantity = f"test {score.name}, difference to {self._reference(row).label}"
            for depth, difference in self._differences(row).items():
                yield Fact.mean(row.label, f"{depth} hidden layers", quantity, score.unit, difference)
