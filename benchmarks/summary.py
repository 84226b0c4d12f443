"""The records of a suite in figures: one row an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import nan
from statistics import fmean, stdev
from typing import Any

from gradfree.benchmarks.case import Case, Row
from gradfree.benchmarks.records import Record
from gradfree.benchmarks.suites import Suite
from gradfree.benchmarks.tasks import Task
from gradfree.benchmarks.training import Training


@dataclass(frozen=True)
class Estimate:
    """Mean and sample standard deviation; NaN where there are too few values."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from ``values``, one a seed."""
        return cls(_mean(values), stdev(values) if len(values) > 1 else nan)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.spread:.2f}"


@dataclass(frozen=True)
class RowSummary:
    """What is known of one engine on one task; NaN where no record tells.

    Attributes:
        row: the engine.
        validation: score.
        test: score.
        cosine: of its gradients and exact ones, mean over training steps and seeds.
        relative_error: likewise.
        ratio: of its step time to the baseline's, median.
        ratio_quartiles: likewise.
        memory: peak of a step, in bytes.
    """

    row: Row
    validation: Estimate
    test: Estimate
    cosine: float
    relative_error: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    memory: float


@dataclass(frozen=True)
class Summary:
    """What is known of the engines on one task and device; the first row is the baseline."""

    task: Task
    device: str
    seeds: int
    rows: tuple[RowSummary, ...]
    environment: dict[str, Any]


def summarise(suite: Suite, records: Mapping[str, Record]) -> Iterator[Summary]:
    """Yield a summary for each device and task that ``records``, those of this configuration, tell of."""
    for device in dict.fromkeys(record["config"]["device"] for record in records.values()):
        for comparison in suite:
            task, rows = comparison.task, comparison.rows
            runs = [_matching(records, Training(task=task, row=row, device=device, seed=0)) for row in rows]
            speed = _matching(records, comparison.speed(device))
            if found := [*speed, *chain(*runs)]:
                costs = speed[0]["results"]["rows"] if speed else [None] * len(rows)
                yield Summary(
                    task=task,
                    device=device,
                    seeds=max(map(len, runs)),
                    rows=tuple(map(_row_summary, rows, runs, costs)),
                    environment=found[0]["environment"],
                )


def _matching(records: Mapping[str, Record], case: Case) -> list[Record]:
    """Return the records of ``case`` for any seed."""
    return [record for record in records.values() if record["config"] == case.config]


def _row_summary(row: Row, runs: Sequence[Record], cost: dict[str, Any] | None) -> RowSummary:
    results = [run["results"] for run in runs]
    probes = [probe for result in results for probe in result["fidelity"]]
    return RowSummary(
        row=row,
        validation=Estimate.of([result["validation"] for result in results]),
        test=Estimate.of([result["test"] for result in results]),
        cosine=_mean([probe["cosine"] for probe in probes]),
        relative_error=_mean([probe["relative_error"] for probe in probes]),
        ratio=cost["ratio"] if cost else nan,
        ratio_quartiles=tuple(cost["ratio_quartiles"]) if cost else (nan, nan),
        memory=cost["peak_memory"] if cost else nan,
    )


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else nan
