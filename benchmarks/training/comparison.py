"""Comparison of engines on one task: how well a model trains with each, and what a step costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Any, ClassVar

from gradfree import Fidelity
from gradfree.benchmarks.data.bundled import Data, digits
from gradfree.benchmarks.data.stored import Stored
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.experiment import Experiment, records_of_case
from gradfree.benchmarks.tables.facts import table, with_means
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import cost_facts
from gradfree.benchmarks.timing.timed import Timing, speed
from gradfree.benchmarks.training.alignment import aligned_facts, alignment
from gradfree.benchmarks.training.outcomes import (
    defaults,
    front_facts,
    loss_facts,
    run_facts,
    score_in,
    score_metric,
    size_facts,
    sizes,
)
from gradfree.benchmarks.training.summary import Summary
from gradfree.chains.handle import Handle
from gradfree.cli import UsageError
from gradfree.extras import require
from gradfree.fidelity import loss_fidelity

_PROBES = 5
"""Number of steps at which a gradient is compared with the exact one."""
_LOSSES = 20
"""Number of steps whose loss is recorded."""


@dataclass(frozen=True, kw_only=True)
class Training(Case):
    """One training run of one row from one seed."""

    kind: ClassVar[str] = "training"
    alone: ClassVar[bool] = False
    scored: ClassVar[tuple[str, ...]] = ("validation", "test")
    task: Task
    row: Row

    @property
    def topic(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def subject(self) -> str:
        """The row's label."""
        return self.row.label

    def __str__(self) -> str:
        return f"{self.topic} {self.subject.replace(self.row.label, self.row.name, 1)}"

    def run(self) -> dict[str, Any]:
        """Train; return the loss and the gradient's fidelity at some steps, and the scores at the end."""
        task, engine = self.task, self.row.create_engine()
        data = Data(*(task.on(self.device, split) for split in task.data()))
        model = task.create_model(self.seed).to(self.device)
        optimizer, schedule = task.create_optimizer(model)
        about = {"sizes": sizes(model, data), "defaults": defaults(engine, self.row.options)}
        losses, fidelity, curve = [], [], []
        # Attached for the whole run: engines keep running means, feedback and the number of steps.
        with engine.attach(model, task.chains) as handle:
            for step, batch in enumerate(task.batches(data.train, self.seed)):
                optimizer.zero_grad()
                compute = partial(task.loss_of, model, batch)
                loss = compute()
                with handle.lesson(batch.targets, compute):
                    if step in _spread(_PROBES, task.steps):
                        fidelity.append({"step": step, **self.probe(loss_fidelity(loss, model, handle), handle)})
                    loss.backward()
                optimizer.step()
                schedule.step()
                if step in _spread(_LOSSES, task.steps):
                    losses.append({"step": step, "loss": loss.item()})
                if step in _spread(task.evaluations, task.steps):
                    curve.append({"step": step, "validation": task.score.of(model, data.validation)})
        scores = {name: task.score.of(model, getattr(data, name)) for name in self.scored}
        return {"losses": losses, "fidelity": fidelity, **scores, **about} | ({"curve": curve} if curve else {})

    def outcome(self, results: Mapping[str, Any]) -> str:
        """Return the last of the scores."""
        *_, split = self.scored
        score = self.task.score
        return f"{split} {score.name} {results[split]:.2f} {score.unit}"

    def probe(self, fidelity: Fidelity, handle: Handle) -> dict[str, Any]:
        """Return what to record of the gradient's fidelity at one step.

        The head behind the chains has its exact gradient with every engine, so that the whole gradient's cosine says
        little; "chain" is the cosine of the chains' own parameters.
        """
        total = fidelity.total
        # A gradient of zero has no direction.
        own = (fidelity.chains.cosine if fidelity.chains.norm_ratio else 0.0) if handle.chains else total.cosine
        return {
            "cosine": total.cosine,
            "relative_error": total.relative_error,
            "chain": round(own, 6),
            **alignment(fidelity, handle.chains),
        }


@dataclass(frozen=True, kw_only=True)
class Trial(Training):
    """A training run that tries a learning rate: scored on validation data, with a seed that no reported run has."""

    kind: ClassVar[str] = "trial"
    scored: ClassVar[tuple[str, ...]] = ("validation",)
    seed: int = -1

    @property
    def subject(self) -> str:
        """The row's label and the learning rate."""
        return f"{self.row.label} at {self.task.learning_rate:g}"


def _spread(count: int, steps: int) -> set[int]:
    """Return up to ``count`` evenly spaced steps, with the first and the last; for a count of 1, the last."""
    if count < 2:
        return {steps - 1} if count else set()
    return {round(i * (steps - 1) / (count - 1)) for i in range(count)}


@dataclass(frozen=True)
class Comparison(Experiment):
    """Engines on one task.

    Attributes:
        task: the task.
        rows: the engines; the first is the baseline.
        learning_rates: ascending; each row trains at the one with the best validation score. By default, all train at
            the task's.
        rates: fixed learning rates by row label; these rows have no trials.
        trial_steps: length of the trials of learning rates; by default, that of the training.
        trained: the cases that train.
    """

    task: Task
    rows: tuple[Row, ...]
    learning_rates: tuple[float, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    trial_steps: int | None = None
    trained: type[Training] = Training

    def check(self) -> None:
        """Raise a UsageError if an engine is unknown, two rows have one label, or the data are missing."""
        try:
            for row in self.rows:
                row.create_engine()
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.task.name}: {error}") from error
        label, times = Counter(row.label for row in self.rows).most_common(1)[0]
        if times > 1:
            raise UsageError(f"{self.task.name}: {times} rows are called {label!r}; labels distinguish rows.")
        if self.task.data is digits:
            require("bench", "sklearn")
        if isinstance(self.task.data, Stored):
            self.task.data.folder()

    @property
    def trainings(self) -> list[tuple[Task, Row]]:
        """Each row with the task that it is trained on."""
        return [(self.task, row) for row in self.rows]

    def trials(self, device: str) -> Iterator[Trial]:
        """Yield a run of each row at each learning rate."""
        return (trial for task, row in self.trainings for trial in self._trials(task, row, device))

    def training(self, seed: int, device: str, records: Mapping[str, Record]) -> Iterator[Training | None]:
        """Yield one training run of each row; ``None`` if the learning rate is not chosen yet."""
        for task, row in self.trainings:
            tuned = self._tuned(task, row, device, records)
            yield self.trained(task=tuned, row=row, device=device, seed=seed) if tuned else None

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the case that measures the rows' time and memory."""
        yield Timing(timed=speed, item=self.task, rows=self.rows, device=device, seed=0)

    def runs(self, records: Mapping[str, Record], device: str) -> Iterator[tuple[Row, float, list[Record]]]:
        """Yield each row with its learning rate, NaN if not chosen yet, and the records of its runs."""
        for (_, row), case in zip(self.trainings, self.training(0, device, records), strict=True):
            yield row, case.task.learning_rate if case else nan, list(records_of_case(records, case)) if case else []

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return scores, cosines, costs and failures of each row, and its differences to the first row."""
        found = list(self.runs(records, device))
        trained = [record for _, _, runs in found for record in runs]
        timed = [r for case in self.timing(device) for r in records_of_case(records, case) if not error_of(r)]
        if not trained and not timed:
            return table([])
        environment = (*timed, *trained)[0]["environment"]
        baseline = self.rows[0].name
        costs = timed[0]["results"]["rows"] if timed else [{} for _ in self.rows]
        where = {"task": self.task.name, "device": device, "threads": environment["threads"]}
        known = list(size_facts(trained, **where))
        for (row, rate, runs), cost in zip(found, costs, strict=True):
            who = {**where, **row.fact_columns}
            known += run_facts(self.task, row, runs, rate, **who)
            known += cost_facts(cost, {**costs[0], "label": baseline}, **who)
            known += [*loss_facts(runs, **who), *aligned_facts(runs, **who)]
        references = dict.fromkeys((row.name for row in self.rows), baseline)
        facts = with_means(table(known), score_metric(self.task), references)
        return pl.concat([facts, front_facts(self.task, facts, baseline)])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with the table of the rows, their verdicts, and charts of scores and gradients."""
        return Summary(self.task, self.learning_rates, facts).section

    def _trials(self, task: Task, row: Row, device: str) -> list[Trial]:
        steps = self.trial_steps or task.steps
        tasks = [replace(task, learning_rate=rate, steps=steps) for rate in self.learning_rates]
        return [Trial(task=tried, row=row, device=device) for tried in tasks]

    def _tuned(self, task: Task, row: Row, device: str, records: Mapping[str, Record]) -> Task | None:
        """Return the task with the row's learning rate, ``None`` if it is not chosen yet."""
        if row.label in self.rates:
            return replace(task, learning_rate=self.rates[row.label])
        if not self.learning_rates:
            return task
        trials = self._trials(task, row, device)
        if not all(trial.id in records for trial in trials):
            return None
        goodness = task.score.goodness
        # A failed trial counts like a diverged one.
        best = max(trials, key=lambda trial: goodness(score_in(records[trial.id]["results"], "validation")))
        return replace(task, learning_rate=best.task.learning_rate)
