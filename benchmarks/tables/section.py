"""One comparison of a report: a query on facts, and how what it finds is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradfree.benchmarks.tables.chart import Chart
from gradfree.benchmarks.tables.column import Cell, Column
from gradfree.benchmarks.tables.frames import pl

ENGINE = {"engine": "row"}
"""Rows of tables that are one engine's each."""
_FEWEST = 3
"""Points of a chart."""


@dataclass(frozen=True)
class Section:
    """What one comparison comes to.

    Attributes:
        title: what was compared.
        facts: all of its numbers, a table as :mod:`gradfree.benchmarks.tables.facts` has it.
        columns: of the table.
        legend: what the table's signs and columns mean.
        setup: what was run, in sentences, if the title does not tell it all.
        names: the headings of the first columns, which name a row, and the facts' columns that they are.
        verdicts: what each row comes to, in words; nothing if that cannot be said row by row.
        remarks: what else the facts say.
        charts: of the facts.
        answer: what the comparison comes to in a sentence; nothing if it answers no question by itself.
    """

    title: str
    facts: pl.DataFrame
    columns: Sequence[Column]
    legend: str
    setup: str = ""
    names: Mapping[str, str] = field(default_factory=lambda: ENGINE)
    verdicts: Sequence[str] = ()
    remarks: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    answer: str = ""

    @property
    def labels(self) -> int:
        """How many of the table's first columns name its rows."""
        return len(self.names)

    @cached_property
    def head(self) -> list[str]:
        """The table's headings."""
        return [*self.names, *(column.heading for column in self.columns)]

    @cached_property
    def rows(self) -> list[list[Cell]]:
        """The table's rows, in the order in which the facts name them; what no row is named by is not shown."""
        by_name: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for fact in self.facts.filter(pl.col("seed").is_null()).iter_rows(named=True):
            names = tuple(fact[name] for name in self.names.values())
            if None not in names:
                by_name.setdefault(names, []).append(fact)
        return [
            [*(Cell(text, None) for text in names), *(column.cell(facts) for column in self.columns)]
            for names, facts in by_name.items()
        ]

    @property
    def drawn(self) -> list[Chart]:
        """The charts that are worth drawing: two points are read sooner in the table."""
        return [chart for chart in self.charts if chart.points.height >= _FEWEST]

    @property
    def sentences(self) -> list[str]:
        """What the table comes to row by row, then the remarks."""
        lines = [
            f"{', '.join(cell.text for cell in row[: self.labels])}: {words}."
            for row, words in zip(self.rows, self.verdicts, strict=False)
        ]
        return [*lines, *self.remarks]
