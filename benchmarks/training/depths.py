"""How well engines train networks of several depths, and how well their gradients point layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import polars as pl
from torch import nn

from gradfree import Fidelity
from gradfree.benchmarks.data.stored import Stored
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.chart import Axis, Chart, points, score_axis
from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.experiment import Experiment
from gradfree.benchmarks.tables.facts import Fact, differences, fact, means, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.comparison import Comparison, Training
from gradfree.benchmarks.training.depth_summary import ALIGNMENT, DRIFT, DepthSummary
from gradfree.benchmarks.training.outcomes import defaults_facts, run_facts, scored, setup_facts
from gradfree.orthogonal.weights import drift, is_matrix, weights_of

_DIGITS = 4
_EVERY = "orthogonalize_every"
_STEPS = Axis("optimizer steps between retractions (count)", "counts")


@dataclass(frozen=True, kw_only=True)
class LayerwiseTraining(Training):
    """A training run that keeps each layer's alignment with its true gradient, and how orthogonal the weights stay."""

    kind: ClassVar[str] = "layerwise training"

    def probed(self, fidelity: Fidelity) -> dict[str, Any]:
        """Return the whole gradient's fidelity and the cosine of each layer's, in their order."""
        layers = [round(agreement.cosine, _DIGITS) for agreement in fidelity.layers.values()]
        return {**super().probed(fidelity), "layers": layers}

    def watched(self, model: nn.Module) -> dict[str, Any]:
        """Return the largest ‖W Wᵀ - I‖ of the weights."""
        return {"drift": drift(weights_of(filter(is_matrix, model.modules()))).max().item()}


class _Layerwise(Comparison):
    """Engines on one task, looked at layer by layer and not timed."""

    trained = LayerwiseTraining
    is_timed = False


@dataclass(frozen=True)
class DepthSweep(Experiment):
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

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return scores, gradients and drift of each row at each depth, and differences to its reference."""
        known: list[Fact] = []
        runs: list[Record] = []
        for depth, comparison in self.comparisons.items():
            for row, rate, found in comparison.runs(records, device):
                runs += found
                who = {
                    "task": self.task.name,
                    "device": device,
                    "setting": f"{depth} hidden layers",
                    "at": float(depth),
                }
                who |= {"row": row.label, "series": row.label}
                known += [
                    *run_facts(self.task, found, rate, _hidden_cosine, **who),
                    *defaults_facts(row, found, **who),
                    *_layer_facts(found, depth == max(self.depths), who),
                ]
        about = setup_facts(self.task, self.learning_rates, runs, task=self.task.name, device=device)
        single = table([*about, *known] if runs else [])
        return pl.concat([single, means(single), differences(single, scored(self.task), self.references)])

    @property
    def references(self) -> dict[str, str]:
        """The baseline by row or, if another row is its engine with the row's own options, that."""
        baseline, *others = self.rows
        return {
            row.label: next((r.label for r in others if _is_exact(r, baseline, row)), baseline.label) for row in others
        }

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of scores by depth, and charts of scores and of gradients layer by layer."""
        return DepthSummary(self.task, self.learning_rates, self.references, facts).section


def _is_exact(candidate: Row, baseline: Row, row: Row) -> bool:
    return candidate != row and (candidate.engine, candidate.options) == (baseline.engine, row.options)


def _hidden_cosine(probe: Mapping[str, Any]) -> float:
    """Return the mean cosine of the hidden layers at one step."""
    return fmean(probe["layers"][:-1])


def _layer_facts(runs: Sequence[Record], deepest: bool, who: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the largest drift seen and, of the deepest network, each layer's mean cosine, by training step."""
    results = [record["results"] for record in runs if not error_of(record)]
    if results:
        largest = max((loss["drift"] for result in results for loss in result["losses"]), default=nan)
        yield fact(DRIFT, "1", largest, **who)
        if not deepest:
            return
        probes = [[probe["layers"] for probe in result["fidelity"]] for result in results]
        for probe, layers in zip(results[0]["fidelity"], np.mean(probes, axis=0), strict=True):
            for n, cosine in enumerate(layers, 1):
                place = {"setting": f"{who['setting']}, step {probe['step']}, layer {n}", "at": float(n)}
                yield fact(ALIGNMENT, "1", float(cosine), **{**who, **place})


@dataclass(frozen=True)
class CadenceSummary(DepthSummary):
    """What the facts on an engine by cadence and depth say; ``cadences`` has the rows that have one."""

    cadences: dict[str, int]

    bracket: ClassVar[Figure] = Figure(DRIFT, "{value:.1e}")
    bracketed: ClassVar[str] = "the largest ‖W Wᵀ - I‖ seen in any layer"
    answer: ClassVar[str] = ""

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"optimizer steps between retractions; {super().title}"

    def charts(self) -> Iterator[Chart]:
        """Yield score and drift against the cadence: a line for each depth, a level for each row without a cadence."""
        where, score = f"{self.task.name}, {self.device}", self.task.score
        drift = Axis("largest ‖W Wᵀ − I‖ (spectral norm)", "log")
        yield Chart(
            f"{where}: {score.name} against cadence",
            self._by_cadence(Figure(scored(self.task))),
            _STEPS,
            score_axis("test", score),
            "solid",
        )
        yield Chart(f"{where}: drift against cadence", self._by_cadence(Figure(DRIFT)), _STEPS, drift, "solid")

    def _by_cadence(self, figure: Figure) -> pl.DataFrame:
        found = points(self.facts, "at", figure, label="setting")
        every = pl.col("row").replace_strict(self.cadences, default=None, return_dtype=pl.Int64)
        level = pl.concat_str("row", pl.lit(", "), "setting")
        return found.with_columns(x=every, label=pl.when(every.is_null()).then(level).otherwise("label"))


@dataclass(frozen=True)
class Cadences(DepthSweep):
    """An engine with several values of ``orthogonalize_every``, or without it, at several depths."""

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of scores and drift by depth."""
        return CadenceSummary(self.task, self.learning_rates, self.references, facts, _cadences(self.rows)).section


def _cadences(rows: tuple[Row, ...]) -> dict[str, int]:
    return {row.label: row.options[_EVERY] for row in rows if _EVERY in row.options}
