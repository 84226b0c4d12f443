"""The suite that shows what it saves to watch an engine's gradient while it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from gradfree import GradientWatch
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.suites.rows import BACKPROP, iterated
from gradfree.benchmarks.tables.chart import Axis, Chart, runs
from gradfree.benchmarks.tables.column import Column, column
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tables.facts import Fact, fact, run_fact, table
from gradfree.benchmarks.tasks.catalogue import PYDOC
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.outcomes import COSINE, scored
from gradfree.benchmarks.training.summary import Summary

_LOOK, _ACTED, _EXACT = "cosine when looked at", "options made better", "runs that go on exact"


@dataclass(frozen=True)
class WatchedRow(Row):
    """An engine whose gradient is watched; see :class:`gradfree.GradientWatch`.

    Attributes:
        every: steps from one look to the next.
        least_cosine: below which the engine takes better options.
    """

    every: int
    least_cosine: float

    def watch(self) -> GradientWatch:
        """Return a new watch."""
        return GradientWatch(self.every, self.least_cosine)


@dataclass(frozen=True)
class WatchingSummary(Summary):
    """What the facts on a task say, some of whose rows are watched."""

    def _cost(self, label: str) -> str:
        """Return nothing: steps are not timed."""
        return ""

    @property
    def _legend(self) -> str:
        return (
            f"±: 95 % confidence interval of the mean over seeds (Student's t, n = {self._seeds}). Cosine: between the "
            "gradient that the engine has and exact backpropagation's, mean over the training. Better options: how "
            "often the watch has had the engine take them. In words: difference to the first row's, seed by seed."
        )

    @property
    def _columns(self) -> list[Column]:
        score = self.task.score
        return [
            column(f"test {score.name} ({score.unit})", scored(self.task), "{value:.3f} ± {margin:.3f}"),
            column("cosine", COSINE, "{value:.3f}"),
            column("better options", _ACTED, "{note}"),
            column("exact in the end", _EXACT, "{note}"),
        ]

    def _charts(self) -> Iterator[Chart]:
        yield from super()._charts()
        looks = runs(self.facts, _LOOK)
        if not looks.is_empty():
            title = f"{self.task.name}: what watching sees, a line a run"
            yield Chart(title, looks, Axis("step (number)"), Axis("cosine with the exact gradient"), "solid")


@dataclass(frozen=True)
class Watching(Comparison):
    """Engines on one task, watched and not. Steps are not timed: what one takes changes on the way."""

    is_timed = False
    summary = WatchingSummary

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return the comparison's facts, and what the watches have seen and done."""
        found = super().facts(records, device)
        known: list[Fact] = []
        for row, _, own in self.runs(records, device):
            if isinstance(row, WatchedRow):
                who = {"task": self.task.name, "device": device, "row": row.label, "series": row.series}
                known += _seen([record for record in own if not error_of(record)], who)
        return pl.concat([found, table(known)])


def _seen(found: Sequence[Record], who: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what the watches of some runs have seen, and what they did."""
    for record in found:
        for step, cosine in record["results"]["looks"].items():
            place = {"setting": f"step {step}", "at": float(step)}
            yield run_fact(_LOOK, "1", cosine, record["seeds"][0], **who, **place)
    if found:
        risen = [record["results"]["risen"] for record in found]
        yield fact(_ACTED, "count", note=" ".join(map(str, risen)), **who)
        exact = sum(record["results"]["exact"] for record in found)
        yield fact(_EXACT, "1", exact, note=f"{exact} of {len(found)}", **who)


# At a rate and for so long that the blocks leave the neighbourhood of the identity, where k = 0 is nearly exact.
_TASK = replace(
    PYDOC,
    name="pydoc_watched",
    options={**PYDOC.options, "width": 48},
    learning_rate=3e-3,
    batch_size=8,
    steps=250,
)
(_UNWATCHED,) = iterated("highway_bp", 0)
_WATCHED = WatchedRow(
    f"{_UNWATCHED.label}, watched", _UNWATCHED.engine, _UNWATCHED.options, every=50, least_cosine=0.99
)

WATCHING: Suite = (Watching(_TASK, (BACKPROP, _UNWATCHED, _WATCHED)),)
