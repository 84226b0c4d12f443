"""Engines on one task at several depths: how well they train, and the cosine of each layer's gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from gradfree import Fidelity
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points, score_axis
from gradfree.benchmarks.tables.column import Column, Figure
from gradfree.benchmarks.tables.facts import Fact, difference_to, estimates, select, table, with_means
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training import outcomes
from gradfree.benchmarks.training.comparison import Comparison, Training
from gradfree.benchmarks.training.outcomes import COSINE, FAILED, score_metric
from gradfree.chains.handle import Handle


@dataclass(frozen=True, kw_only=True)
class LayerwiseTraining(Training):
    """A training run that also records each layer's cosine with its exact gradient."""

    kind: ClassVar[str] = "layerwise training"

    def probe(self, fidelity: Fidelity, handle: Handle) -> dict[str, Any]:
        """Return the fidelity of the whole gradient, and the cosine of each layer's gradient in order."""
        layers = [round(agreement.cosine, 4) for agreement in fidelity.layers.values()]
        return {**super().probe(fidelity, handle), "layers": layers}


@dataclass(frozen=True)
class DepthSweep(Comparison):
    """Engines on one task at several depths, untimed; each row has a learning rate at each depth.

    Attributes:
        depths: options of the task's model by number of hidden layers, ascending.
    """

    trained: type[Training] = LayerwiseTraining
    depths: Mapping[int, Mapping[str, Any]] = field(kw_only=True)

    @property
    def trainings(self) -> list[tuple[Task, Row]]:
        """Each row at each depth."""
        tasks = [
            replace(self.task, name=f"{self.task.name}_{depth}", options={**self.task.options, **options})
            for depth, options in self.depths.items()
        ]
        return [(task, row) for task in tasks for row in self.rows]

    def timing(self, device: str) -> Iterator[Case]:
        """Yield nothing."""
        return iter(())

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return scores and cosines of each row at each depth, and its differences to its reference."""
        where = {"task": self.task.name, "device": device}
        known: list[Fact] = []
        runs: list[Record] = []
        depths = (depth for depth in self.depths for _ in self.rows)
        for depth, (row, rate, found) in zip(depths, self.runs(records, device), strict=True):
            runs += found
            who = {"setting": f"{depth} hidden layers", "at": float(depth), "row": row.name, "series": row.name}
            known += outcomes.run_facts(self.task, row, found, rate, **where, **who)
        known += outcomes.size_facts(runs, **where)
        return with_means(table(known if runs else []), score_metric(self.task), self.references)

    @property
    def references(self) -> dict[str, str]:
        """The row that each row is compared with.

        That is the baseline or, if there is one, the row of the baseline's engine with the row's options.
        """
        baseline, *others = self.rows
        exact = {str(row.options): row for row in reversed(others) if row.engine == baseline.engine}
        found = {row.name: exact.get(str(row.options), baseline) for row in others}
        return {name: (baseline if exact.name == name else exact).name for name, exact in found.items()}

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with the table of scores by depth, a verdict on each row, and the chart of scores."""
        task, score, metric = self.task, self.task.score, score_metric(self.task)
        depths: dict[float, str] = dict(select(facts, metric=FAILED).select("at", "setting").iter_rows())
        figures = Figure(metric, "{value:.2f} ± {margin:.2f}"), Figure(COSINE)
        seeds, device = facts["seed"].drop_nulls().n_unique(), facts["device"][0]
        options = [f"{name} {task.options[name]}" for name in ("width", "activation") if name in task.options]
        model = task.model + (f" ({', '.join(options)})" if options else "")
        where = f"{task.name} ({task.options.get('activation', 'tanh')}), {device}"
        return Section(
            title=f"{task.name}: {model} by depth, {task.steps} steps, seeds: {seeds}, device: {device}",
            facts=facts,
            columns=[Column(f"{depth:g}", figures, {"setting": setting}) for depth, setting in depths.items()],
            setup=outcomes.setup_words(task, bool(self.learning_rates), facts),
            legend=(
                f"Columns: hidden layers. Test {score.name} ({score.unit}) ± {verdict.interval(seeds, seeds)}; in "
                "brackets, the cosine between each hidden layer's gradient and "
                "the exact one at the same weights, mean over layers and training. In words: differences in test "
                f"{score.name}, seed by seed, with the same interval. Learning rates: for each engine and depth the "
                f"one of {', '.join(f'{rate:g}' for rate in self.learning_rates)} with the best validation score, with "
                "another seed."
            ),
            verdicts=[self._verdict(row.name, facts) for row in self.rows],
            remarks=list(outcomes.edge_remarks(self.learning_rates, facts)),
            charts=[
                Chart(
                    f"{where}: {score.name} against depth",
                    points(facts, "at", Figure(metric), "row"),
                    Axis("hidden layers (count)", "log"),
                    score_axis("test", score),
                    lines=True,
                )
            ],
            answer=self._answer(facts, list(depths.values())[-1]),
        )

    def _verdict(self, row: str, facts: pl.DataFrame) -> str:
        """Return how a row's score differs from its reference's at each depth."""
        if row not in self.references:
            return "the baseline"
        score, reference = self.task.score, self.references[row]
        depths: defaultdict[str, list[str]] = defaultdict(list)
        found = estimates(facts, by="at", metric=difference_to(reference, score_metric(self.task)), row=row)
        for depth, difference in found.items():
            outcome, figures = verdict.change(difference, score.higher_is_better)
            counts = figures and outcome not in (verdict.SAME, verdict.FEW)
            depths[outcome].append(f"{depth:g} ({figures})" if counts else f"{depth:g}")
        words = "; ".join(f"{outcome} at {', '.join(at)}" for outcome, at in depths.items())
        return f"{score.name} beside {reference}: {words or 'not compared'}"

    def _answer(self, facts: pl.DataFrame, setting: str) -> str:
        """Return which row has the best score in the deepest network."""
        score = self.task.score
        scores = estimates(facts, metric=score_metric(self.task), setting=setting)
        if len(scores) < 2:
            return ""
        best = max(scores, key=lambda row: score.goodness(scores[row].value))
        return (
            f"{self.task.name}: with {setting}, {best} has the best mean test {score.name}, {scores[best].value:.2f} "
            f"{score.unit}; {self._verdict(best, facts)}."
        )
