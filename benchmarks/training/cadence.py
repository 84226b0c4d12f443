"""What it costs in accuracy to lead weights back to orthogonal ones less often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis, Chart, points, score_axis
from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.training.depth_summary import DRIFT, DepthSummary
from gradfree.benchmarks.training.depths import DepthSweep
from gradfree.benchmarks.training.outcomes import scored

_EVERY = "orthogonalize_every"
_STEPS = Axis("optimizer steps between retractions (count)", "counts")


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
