"""Experiments that time steps side by side: a case for each subject, and the facts that the records tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import polars as pl

from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.estimates import Estimate
from gradfree.benchmarks.tables.experiment import Experiment, outcomes
from gradfree.benchmarks.tables.facts import Fact, fact, select, table

STEP, MEMORY = "step time", "peak memory"
MIB = 2**20
_ERROR = "error"

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Timings(Experiment, Generic[Subject]):
    """Engines on some subjects.

    Attributes:
        subjects: what is run: layers, models, sizes.
        rows: the engines; none where it is no engines that are compared.
        threads: for torch to use; left out, as many as it does.
        metric: what the time of a step is called.
        timed: the kind of case that times all rows on a subject.
    """

    subjects: tuple[Subject, ...]
    rows: tuple[Row, ...] = ()
    threads: int | None = None
    metric: ClassVar[str] = STEP
    timed: ClassVar[type[Case]]

    def case(self, subject: Subject, /, **where: Any) -> Case:
        """Return the case that times all rows on ``subject``, with its ``rows``, ``threads``, ``device`` and seed."""
        return self.timed(**where | {self.timed.topic_field: subject})

    def timing(self, device: str) -> Iterator[Case]:
        """Yield one case a subject."""
        for subject in self.subjects:
            yield self.case(subject, rows=self.rows, threads=self.threads, device=device, seed=0)

    def where(self, case: Case) -> dict[str, Any]:
        """Return what tells a case's facts from those of other cases."""
        return {"setting": case.topic}

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return what each row takes; nothing if all cases failed."""
        place = {"device": device, "threads": self.threads}
        found = table(
            place | self.where(case) | told
            for case in self.timing(device)
            for record in outcomes(records, case)
            for told in self.told(case, record)
        )
        return found if found["value"].count() else found.clear()

    def told(self, case: Case, record: Record) -> Iterator[Fact]:
        """Yield what a case's record tells of each row, or that it failed."""
        if error := error_of(record):
            yield fact(_ERROR, "", note=error)
        results = record["results"]
        named = {row.label: row for row in self.rows}
        for cost in results.get("rows", ()):
            label = cost["label"]
            who = named[label].named if label in named else {"row": label, "series": label, "k": None}
            yield from (told | who for told in self.cost(cost, results))
        for label, error in results.get("errors", {}).items():
            yield fact(_ERROR, "", note=error, row=label)

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what is recorded of a row, or its error."""
        if "error" in cost:
            yield fact(_ERROR, "", note=cost["error"].splitlines()[-1])
        yield from cost_facts(cost, results["rows"][0], self.metric)

    def failures(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield what did not run, in words."""
        for told in select(facts, metric=_ERROR).iter_rows(named=True):
            what = ", ".join(told[name] for name in ("setting", "row") if told[name])
            yield f"{what} did not run: {told['note']}."


def cost_facts(cost: Mapping[str, Any], exact: Mapping[str, Any], metric: str = STEP, /, **who: Any) -> Iterator[Fact]:
    """Yield what a row costs, also as a multiple of the baseline's; nothing if it was not timed."""
    if "time" in cost:
        yield fact(metric, "s", Estimate.recorded(cost, "time"), **who)
        yield fact(metric, times(exact["label"]), Estimate.recorded(cost, "ratio"), **who)
    if "peak_memory" in cost:
        yield fact(MEMORY, "MiB", cost["peak_memory"] / MIB, **who)
        yield fact(MEMORY, times(exact["label"]), cost["peak_memory"] / exact["peak_memory"], **who)


def times(baseline: str) -> str:
    """Return the unit of multiples of the baseline's."""
    return f"× {baseline}"


def time_of(phase: str) -> str:
    """Return the metric of a phase of a step."""
    return f"time of {phase}"
