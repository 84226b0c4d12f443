"""Engines compared at several depths: which facts make the table, what they come to in words, what is drawn of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import polars as pl

from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points, score_axis
from gradfree.benchmarks.tables.column import Column, Figure
from gradfree.benchmarks.tables.facts import Estimate, difference_to, estimates, select
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.outcomes import COSINE, FAILED, RATE, scored, setup_words

DRIFT = "largest drift from orthogonality"
ALIGNMENT = "cosine with the exact gradient, layer by layer"
_EXACT = 1 - 1e-3
"""From which on a cosine is not worth a line."""


@dataclass(frozen=True)
class DepthSummary:
    """What the facts on one task by depth and device say; ``references`` has the row that each is compared with."""

    task: Task
    grid: tuple[float, ...]
    references: Mapping[str, str]
    facts: pl.DataFrame

    bracket: ClassVar[Figure] = Figure(COSINE)
    bracketed: ClassVar[str] = (
        "the cosine between each hidden layer's gradient and the true one at the same weights, mean over layers and "
        "training"
    )

    @property
    def section(self) -> Section:
        """The section on it."""
        score = Figure(scored(self.task), "{value:.2f} ± {margin:.2f}")
        return Section(
            title=self.title,
            facts=self.facts,
            columns=[
                Column(f"{depth:g}", (score, self.bracket), {"setting": setting})
                for depth, setting in self.depths.items()
            ],
            setup=setup_words(self.task, self.facts),
            legend=self._legend,
            verdicts=[self._verdict(label) for label in self.rows],
            remarks=list(self._remarks()),
            charts=list(self.charts()),
            answer=self.answer,
        )

    @cached_property
    def depths(self) -> dict[float, str]:
        """The depths, with what the facts call them."""
        return dict(select(self.facts, metric=FAILED).select("at", "setting").iter_rows())

    @cached_property
    def rows(self) -> list[str]:
        """The labels of the rows."""
        return select(self.facts, metric=FAILED)["row"].unique(maintain_order=True).to_list()

    @property
    def device(self) -> str:
        """Where it was run."""
        return str(self.facts["device"][0])

    def known(self, metric: str, row: str) -> dict[float, Estimate]:
        """Return what is known of a row by depth."""
        return estimates(self.facts, by="at", metric=metric, row=row)

    @property
    def seeds(self) -> int:
        """The number of training runs of an engine at a depth, at most."""
        return max(
            int(failed.value) + self.known(scored(self.task), row).get(depth, Estimate()).n
            for row in self.rows
            for depth, failed in self.known(FAILED, row).items()
        )

    @property
    def title(self) -> str:
        """Say what was compared."""
        task = self.task
        told = ", ".join(f"{name} {value}" for name, value in task.options.items() if name in ("width", "activation"))
        model = f"{task.model} ({told})" if told else task.model
        return f"{task.name}: {model} by depth, {task.steps} steps, seeds: {self.seeds}, device: {self.device}"

    @property
    def _legend(self) -> str:
        score, rates = self.task.score, ", ".join(f"{rate:g}" for rate in self.grid)
        return (
            f"Columns: hidden layers. Test {score.name} ({score.unit}) ± 95 % confidence interval of the mean over "
            f"seeds (Student's t, n = {self.seeds}), and in brackets {self.bracketed}. In words: differences in test "
            f"{score.name}, seed by seed, with the same interval. Learning rates: of {rates}, for each engine and "
            "depth the one that did best on validation data, with another seed."
        )

    def _verdict(self, row: str) -> str:
        """Return an engine's distance to its reference at each depth, in words."""
        if row not in self.references:
            return "the baseline"
        score, reference = self.task.score, self.references[row]
        depths: defaultdict[str, list[str]] = defaultdict(list)
        for depth, difference in self.known(difference_to(reference, scored(self.task)), row).items():
            outcome, figures = verdict.change(difference, score.higher_is_better)
            told = figures and outcome not in (verdict.SAME, verdict.FEW)
            depths[outcome].append(f"{depth:g} ({figures})" if told else f"{depth:g}")
        outcomes = "; ".join(f"{outcome} at {', '.join(found)}" for outcome, found in depths.items())
        return f"{score.name} beside {reference}: {outcomes or 'not compared'}"

    def _remarks(self) -> Iterator[str]:
        """Yield where a learning rate beyond the grid may be better."""
        ends = (self.grid[0], self.grid[-1])
        edge = [
            f"{row} at {depth:g} ({rate.value:g})"
            for row in self.rows
            for depth, rate in self.known(RATE, row).items()
            if rate.value in ends
        ]
        if edge:
            yield f"Best at the edge of the learning rates, maybe better beyond: {', '.join(edge)}."

    @property
    def answer(self) -> str:
        """Say which row does best in the deepest network."""
        score, setting = self.task.score, list(self.depths.values())[-1]
        scores = estimates(self.facts, metric=scored(self.task), setting=setting)
        if len(scores) < 2:
            return ""
        best = max(scores, key=lambda row: score.goodness(scores[row].value))
        told = f"{self.task.name}: with {setting}, {best} has the best mean test {score.name}"
        told += f", {scores[best].value:.2f} {score.unit}"
        if best not in self.references:
            return f"{told}."
        metric = difference_to(self.references[best], scored(self.task))
        difference = estimates(self.facts, metric=metric, setting=setting).get(best, Estimate())
        words = verdict.score(score.name, difference, score.higher_is_better)
        return f"{told}; beside {self.references[best]}: {words}."

    def charts(self) -> Iterator[Chart]:
        """Yield the score against the depth, and the alignment layer by layer of the deepest network."""
        activation = self.task.options.get("activation", "tanh")
        where = f"{self.task.name} ({activation}), {self.device}"
        name, axis = self.task.score.name, score_axis("test", self.task.score)
        (first, *more), score = self.depths, Figure(scored(self.task))
        if more:
            found, depth = points(self.facts, "at", score), Axis("hidden layers (count)", "counts")
            yield Chart(f"{where}: {name} against depth", found, depth, axis, "solid")
        else:
            found = points(self.facts, "row", score)
            yield Chart(f"{where}: {name} with {first:g} hidden layers", found, Axis("engine", "names"), axis)
        aligned = self._alignment
        if not aligned.is_empty():
            layers = Axis(f"layer, of {list(self.depths)[-1]:g} hidden ones and the output (number)", "whole")
            cosine = Axis("cosine with the true gradient", bounds=(-1.0, 1.0))
            yield Chart(f"{where}: gradients layer by layer", aligned, layers, cosine, "solid", rules={"0": 0.0})

    @property
    def _alignment(self) -> pl.DataFrame:
        """The first engine that is not exact over the training, of the others the end alone."""
        deepest = list(self.depths)[-1]
        inexact = [row for row in self.rows if (told := self.known(COSINE, row).get(deepest)) and told.value < _EXACT]
        found = points(self.facts, "at", Figure(ALIGNMENT)).filter(
            pl.col("setting").str.starts_with(f"{self.depths[deepest]}, step"), pl.col("row").is_in(inexact)
        )
        found = found.with_columns(step=pl.col("setting").str.extract(r"step (\d+)").cast(pl.Int64))
        followed = (pl.col("row") == inexact[0] if inexact else pl.lit(False)) | (
            pl.col("step") == pl.col("step").max()
        )
        label = pl.concat_str("row", pl.lit(", step "), "step")
        strength = (pl.col("step") + 1) / (pl.col("step").max() + 1)
        return found.filter(followed).with_columns(label=label, strength=0.25 + 0.75 * strength)
