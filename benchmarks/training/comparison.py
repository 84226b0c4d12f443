"""Engines on one task: what is run, and what becomes of the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import nan
from typing import ClassVar

from gradfree.benchmarks.data.stored import Stored
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.experiment import Part, matching, outcomes
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.speed import Speed
from gradfree.benchmarks.training.summary import summarise
from gradfree.benchmarks.training.training import TimedTraining, TimedTrial, Training, Trial, score_in


@dataclass(frozen=True)
class Comparison(Part):
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

    @property
    def tries(self) -> int:
        """How many trials each row's training waits for."""
        return len(self.learning_rates)

    def check(self) -> None:
        """Raise a UsageError if the data are not there."""
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
        """Yield the case that measures the rows' cost."""
        yield Speed(task=self.task, rows=self.rows, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the runs on ``device``."""
        cases = list(self.training(0, device, records))
        runs = [list(outcomes(records, case)) if case else [] for case in cases]
        rates = [case.task.learning_rate if case else nan for case in cases]
        (speed,) = (list(matching(records, case)) for case in self.timing(device))
        return summarise(self.task, self.rows, self.learning_rates, rates, runs, speed)

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
