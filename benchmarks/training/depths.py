"""Engines on one task at several depths: how well they train, and the cosine of each layer's gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from torch import nn

from gradfree import Fidelity
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points, score_axis
from gradfree.benchmarks.tables.column import Column, Figure
from gradfree.benchmarks.tables.experiment import Experiment
from gradfree.benchmarks.tables.facts import (
    Estimate,
    Fact,
    difference_to,
    differences,
    estimates,
    fact,
    means,
    select,
    table,
)
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.comparison import Comparison, Training
from gradfree.benchmarks.training.outcomes import (
    COSINE,
    FAILED,
    RATE,
    defaults_facts,
    run_facts,
    score_metric,
    setup_facts,
)
from gradfree.benchmarks.training.summary import Summary
from gradfree.orthogonal.weights import drift, is_matrix, weights_of

DRIFT = "largest drift from orthogonality"
ALIGNMENT = "cosine with the exact gradient, layer by layer"
_EXACT = 1 - 1e-3
"""Rows whose cosine reaches this are not drawn."""


@dataclass(frozen=True)
class DepthSummary(Summary):
    """The section of a depth sweep, made from the facts of one task and device.

    Attributes:
        references: the row that each row is compared with.
    """

    references: Mapping[str, str]

    @property
    def _columns(self) -> list[Column]:
        figures = Figure(score_metric(self.task), "{value:.2f} ± {margin:.2f}"), Figure(COSINE)
        return [Column(f"{depth:g}", figures, {"setting": setting}) for depth, setting in self.depths.items()]

    @cached_property
    def depths(self) -> dict[float, str]:
        """The depths, each with its setting in the facts."""
        return dict(select(self.facts, metric=FAILED).select("at", "setting").iter_rows())

    def known(self, metric: str, row: str) -> dict[float, Estimate]:
        """Return a metric of a row by depth."""
        return estimates(self.facts, by="at", metric=metric, row=row)

    @property
    def _seeds(self) -> int:
        return max(
            int(failed.value) + self.known(score_metric(self.task), row).get(depth, Estimate()).n
            for row in self.rows
            for depth, failed in self.known(FAILED, row).items()
        )

    @property
    def _title(self) -> str:
        task, device = self.task, self.facts["device"][0]
        options = ", ".join(
            f"{name} {value}" for name, value in task.options.items() if name in ("width", "activation")
        )
        model = f"{task.model} ({options})" if options else task.model
        return f"{task.name}: {model} by depth, {task.steps} steps, seeds: {self._seeds}, device: {device}"

    @property
    def _legend(self) -> str:
        score = self.task.score
        return (
            f"Columns: hidden layers. Test {score.name} ({score.unit}) ± 95 % confidence interval of the mean over "
            f"seeds (Student's t, n = {self._seeds}); in brackets, the cosine between each hidden layer's gradient and "
            "the exact one at the same weights, mean over layers and training. In words: differences in test "
            f"{score.name}, seed by seed, with the same interval. Learning rates: for each engine and depth the one of "
            f"{self._rates} with the best validation score, with another seed."
        )

    def verdict(self, row: str) -> str:
        """Return how a row's score differs from its reference's at each depth."""
        if row not in self.references:
            return "the baseline"
        score, reference = self.task.score, self.references[row]
        depths: defaultdict[str, list[str]] = defaultdict(list)
        for depth, difference in self.known(difference_to(reference, score_metric(self.task)), row).items():
            outcome, figures = verdict.change(difference, score.higher_is_better)
            counts = figures and outcome not in (verdict.SAME, verdict.FEW)
            depths[outcome].append(f"{depth:g} ({figures})" if counts else f"{depth:g}")
        outcomes = "; ".join(f"{outcome} at {', '.join(found)}" for outcome, found in depths.items())
        return f"{score.name} beside {reference}: {outcomes or 'not compared'}"

    def _remarks(self) -> Iterator[str]:
        """Yield the rows whose best learning rate is at the edge of the grid."""
        edge = [
            f"{row} at {depth:g} ({rate.value:g})"
            for row in self.rows
            for depth, rate in self.known(RATE, row).items()
            if rate.value in (self.grid[0], self.grid[-1])
        ]
        if edge:
            yield f"Best learning rate at the edge of the grid, maybe better beyond it: {', '.join(edge)}."

    @property
    def _answer(self) -> str:
        """Return which row has the best score in the deepest network."""
        score, setting = self.task.score, list(self.depths.values())[-1]
        scores = estimates(self.facts, metric=score_metric(self.task), setting=setting)
        if len(scores) < 2:
            return ""
        best = max(scores, key=lambda row: score.goodness(scores[row].value))
        answer = f"{self.task.name}: with {setting}, {best} has the best mean test {score.name}"
        answer += f", {scores[best].value:.2f} {score.unit}"
        if best not in self.references:
            return f"{answer}."
        metric = difference_to(self.references[best], score_metric(self.task))
        difference = estimates(self.facts, metric=metric, setting=setting).get(best, Estimate())
        words = verdict.score(score.name, difference, score.higher_is_better)
        return f"{answer}; beside {self.references[best]}: {words}."

    def _charts(self) -> Iterator[Chart]:
        """Yield charts of the score by depth, and of the deepest network's alignment by layer after training."""
        where = f"{self.task.name} ({self.task.options.get('activation', 'tanh')}), {self.facts['device'][0]}"
        name, axis, score = self.task.score.name, score_axis("test", self.task.score), Figure(score_metric(self.task))
        (first, *more), deepest = self.depths, list(self.depths)[-1]
        if more:
            found, depth = points(self.facts, "at", score, "row"), Axis("hidden layers (count)", "counts")
            yield Chart(f"{where}: {name} against depth", found, depth, axis, lines=True)
        else:
            found = points(self.facts, "row", score, "row")
            yield Chart(f"{where}: {name} with {first:g} hidden layers", found, Axis("engine", "names"), axis)
        inexact = [row for row in self.rows if (known := self.known(COSINE, row).get(deepest)) and known.value < _EXACT]
        steps = pl.col("setting").str.extract(rf"^{self.depths[deepest]}, step (\d+)").cast(pl.Int64)
        aligned = points(self.facts, "at", Figure(ALIGNMENT), "row").filter(
            pl.col("row").is_in(inexact), steps == steps.max()
        )
        if aligned.height:
            layers = Axis(f"layer, of {deepest:g} hidden ones and the output (number)", "whole")
            cosine = Axis("cosine with the true gradient", bounds=(-1.0, 1.0))
            title = f"{where}: gradients layer by layer, behind the training"
            yield Chart(title, aligned, layers, cosine, lines=True, rules={"0": 0.0})


@dataclass(frozen=True, kw_only=True)
class LayerwiseTraining(Training):
    """A training run that also records each layer's cosine with its exact gradient, and the weights' orthogonality."""

    kind: ClassVar[str] = "layerwise training"

    def fidelity_results(self, fidelity: Fidelity) -> dict[str, Any]:
        """Return the fidelity of the whole gradient, and the cosine of each layer's gradient in order."""
        layers = [round(agreement.cosine, 4) for agreement in fidelity.layers.values()]
        return {**super().fidelity_results(fidelity), "layers": layers}

    def extra_results(self, model: nn.Module) -> dict[str, Any]:
        """Return the largest ‖W Wᵀ - I‖ of the weights."""
        return {"drift": drift(weights_of(filter(is_matrix, model.modules()))).max().item()}


class _Layerwise(Comparison):
    """A comparison with layerwise results and without timing."""

    trained = LayerwiseTraining
    is_timed = False


@dataclass(frozen=True)
class DepthSweep(Experiment):
    """Engines on one task at several depths.

    Attributes:
        task: the task.
        depths: options of the task's model by number of hidden layers, ascending.
        rows: the engines; the first is the baseline.
        learning_rates: ascending; at each depth, each row trains at the one with the best validation score.
    """

    task: Task
    depths: Mapping[int, Mapping[str, Any]]
    rows: tuple[Row, ...]
    learning_rates: tuple[float, ...]

    @property
    def comparisons(self) -> dict[int, Comparison]:
        """The comparison at each depth."""
        tasks = {
            depth: replace(self.task, name=f"{self.task.name}_{depth}", options={**self.task.options, **options})
            for depth, options in self.depths.items()
        }
        return {depth: _Layerwise(task, self.rows, self.learning_rates) for depth, task in tasks.items()}

    @property
    def trials_per_row(self) -> int:
        """Number of trials that each training run depends on."""
        return len(self.learning_rates)

    def check(self) -> None:
        """Raise a UsageError as :meth:`Comparison.check` does."""
        Comparison(self.task, self.rows).check()

    def trials(self, device: str) -> Iterator[Case]:
        """Yield a run of each row at each depth and learning rate."""
        for comparison in self.comparisons.values():
            yield from comparison.trials(device)

    def training(self, seed: int, device: str, records: Mapping[str, Record]) -> Iterator[Case | None]:
        """Yield one training run of each row at each depth; ``None`` if the learning rate is not chosen yet."""
        for comparison in self.comparisons.values():
            yield from comparison.training(seed, device, records)

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return scores, cosines and drift of each row at each depth, and its differences to its reference."""
        known: list[Fact] = []
        runs: list[Record] = []
        for depth, comparison in self.comparisons.items():
            for row, rate, found in comparison.runs(records, device):
                runs += found
                who: dict[str, Any] = {"task": self.task.name, "device": device, "setting": f"{depth} hidden layers"}
                who |= {"at": float(depth), "row": row.name, "series": row.name}
                known += [
                    *run_facts(self.task, found, rate, _hidden_cosine, **who),
                    *defaults_facts(row, found, **who),
                    *_layer_facts(found, depth == max(self.depths), who),
                ]
        about = setup_facts(self.task, self.learning_rates, runs, task=self.task.name, device=device)
        single = table([*about, *known] if runs else [])
        return pl.concat([single, means(single), differences(single, score_metric(self.task), self.references)])

    @property
    def references(self) -> dict[str, str]:
        """The row that each row is compared with.

        That is the baseline or, if there is one, the row of the baseline's engine with the row's options.
        """
        baseline, *others = self.rows
        return {
            row.name: next((r.name for r in others if _is_exact(r, baseline, row)), baseline.name) for row in others
        }

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with the table of scores by depth, and charts of scores and of layers' cosines."""
        return DepthSummary(self.task, self.learning_rates, facts, self.references).section


def _is_exact(candidate: Row, baseline: Row, row: Row) -> bool:
    return candidate != row and (candidate.engine, candidate.options) == (baseline.engine, row.options)


def _hidden_cosine(probe: Mapping[str, Any]) -> float:
    """Return the mean cosine of the hidden layers' gradients at one step."""
    return fmean(probe["layers"][:-1])


def _layer_facts(runs: Sequence[Record], deepest: bool, who: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the largest drift and, for the deepest network, each layer's mean cosine by training step."""
    results = [record["results"] for record in runs if not error_of(record)]
    if not results:
        return
    yield fact(DRIFT, "1", max((loss["drift"] for result in results for loss in result["losses"]), default=nan), **who)
    if not deepest:
        return
    probes = [[probe["layers"] for probe in result["fidelity"]] for result in results]
    for probe, layers in zip(results[0]["fidelity"], np.mean(probes, axis=0), strict=True):
        for n, cosine in enumerate(layers, 1):
            place = {"setting": f"{who['setting']}, step {probe['step']}, layer {n}", "at": float(n)}
            yield fact(ALIGNMENT, "1", float(cosine), **{**who, **place})
