"""Engines on one task: what is run, and what becomes of the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gradfree.benchmarks.case import Case, Row
from gradfree.benchmarks.part import Part, matching
from gradfree.benchmarks.records import Record
from gradfree.benchmarks.section import Section
from gradfree.benchmarks.speed import Speed
from gradfree.benchmarks.summary import summarise
from gradfree.benchmarks.tasks import Task
from gradfree.benchmarks.training import Training


@dataclass(frozen=True)
class Comparison(Part):
    """Engines on one task.

    Attributes:
        task: what is trained.
        rows: the engines. The first is the baseline of the others.
    """

    task: Task
    rows: tuple[Row, ...]

    def training(self, seed: int, device: str) -> Iterator[Case]:
        """Yield one training run of each row."""
        for row in self.rows:
            yield Training(task=self.task, row=row, device=device, seed=seed)

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the case that measures the rows' cost."""
        yield Speed(task=self.task, rows=self.rows, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the runs on ``device``."""
        runs = [list(matching(records, case)) for case in self.training(0, device)]
        (speed,) = (list(matching(records, case)) for case in self.timing(device))
        return summarise(self.task, self.rows, runs, speed)
