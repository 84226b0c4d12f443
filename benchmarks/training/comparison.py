"""Engines on one task: what is run, and what becomes of the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import nan
from typing import ClassVar

import polars as pl

from gradfree.benchmarks.data.stored import Stored
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.experiment import Experiment, matching, outcomes
from gradfree.benchmarks.tables.facts import differences, means, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import cost_facts
from gradfree.benchmarks.timing.speed import Speed
from gradfree.benchmarks.training.outcomes import (
    defaults_facts,
    front_facts,
    loss_facts,
    run_facts,
    scored,
    setup_facts,
)
from gradfree.benchmarks.training.summary import Summary
from gradfree.benchmarks.training.training import TimedTraining, TimedTrial, Training, Trial, score_in
from gradfree.cli import UsageError


@dataclass(frozen=True)
class Comparison(Experiment):
    """Engines on one task.

    Attributes:
        task: what is trained.
        rows: the engines. The first is the baseline of the others.
        learning_rates: ascending; each row has the one that does best on validation data. Left out, all have the
            task's.
    """

    task: Task
    rows: tuple[Row, ...]
    learning_rates: tuple[float, ...] = ()
    trained: ClassVar[type[Training]] = Training
    is_timed: ClassVar[bool] = True

    @property
    def tries(self) -> int:
        """How many trials each row's training waits for."""
        return len(self.learning_rates)

    def check(self) -> None:
        """Raise a UsageError if there is no such engine, two rows are called alike, or the data are not there."""
        try:
            for row in self.rows:
                row.create_engine()
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.task.name}: {error}") from error
        label, times = Counter(row.label for row in self.rows).most_common(1)[0]
        if times > 1:
            raise UsageError(f"{self.task.name}: {times} rows are called {label!r}; labels tell rows apart.")
        if isinstance(self.task.data, Stored):
            self.task.data.folder()

    def trials(self, device: str) -> Iterator[Trial]:
        """Yield a run of each row at each learning rate."""
        for row in self.rows:
            yield from self._trials(row, device)

    def training(self, seed: int, device: str, records: Mapping[str, Record]) -> Iterator[Training | None]:
        """Yield one training run of each row; ``None`` where the learning rate is yet to be chosen."""
        for row in self.rows:
            task = self._tuned(row, device, records)
            trained = self.trained if self.task.seconds is None else TimedTraining
            yield trained(task=task, row=row, device=device, seed=seed) if task else None

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the case that measures the rows' cost, if they are timed."""
        if self.is_timed:
            yield Speed(task=self.task, rows=self.rows, device=device, seed=0)

    def runs(self, records: Mapping[str, Record], device: str) -> Iterator[tuple[Row, float, list[Record]]]:
        """Yield each row with its learning rate, NaN if that is yet to be chosen, and the records of its runs."""
        for row, case in zip(self.rows, self.training(0, device, records), strict=True):
            yield row, case.task.learning_rate if case else nan, list(outcomes(records, case)) if case else []

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return scores, gradients, costs and failures of each row, and its differences to the first one."""
        found = list(self.runs(records, device))
        trained = [record for _, _, runs in found for record in runs]
        timed = [record for case in self.timing(device) for record in matching(records, case)]
        if not trained and not timed:
            return table([])
        environment = (*timed, *trained)[0]["environment"]
        costs = timed[0]["results"]["rows"] if timed else [{} for _ in self.rows]
        where = {"task": self.task.name, "device": device, "threads": environment["threads"]}
        known = list(setup_facts(self.task, self.learning_rates, trained, **where))
        for (row, rate, runs), cost in zip(found, costs, strict=True):
            who = {**where, **row.named}
            known += [*run_facts(self.task, runs, rate, **who), *cost_facts(cost, costs[0], **who)]
            known += [*defaults_facts(row, runs, **who), *loss_facts(runs, **who)]
        single = table(known)
        name = scored(self.task)
        references = dict.fromkeys((row.label for row in self.rows), self.rows[0].label)
        facts = pl.concat([single, means(single), differences(single, name, references)])
        return pl.concat([facts, front_facts(self.task, facts, self.rows[0].label)])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of the rows, their verdicts, and charts of scores and gradients."""
        return Summary(self.task, self.learning_rates, facts).section

    def _trials(self, row: Row, device: str) -> list[Trial]:
        tasks = [replace(self.task, learning_rate=rate) for rate in self.learning_rates]
        trial = Trial if self.task.seconds is None else TimedTrial
        return [trial(task=task, row=row, device=device) for task in tasks]

    def _tuned(self, row: Row, device: str, records: Mapping[str, Record]) -> Task | None:
        """Return the task at the row's learning rate, if that is known."""
        if not self.learning_rates:
            return self.task
        trials = self._trials(row, device)
        if not all(trial.id in records for trial in trials):
            return None
        goodness = self.task.score.goodness
        # A trial that failed is worth as little as one that diverged.
        return max(trials, key=lambda trial: goodness(score_in(records[trial.id]["results"], "validation"))).task
