"""A section of a report: facts, and the table, sentences and charts made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gradfree.benchmarks.tables.chart import Chart
from gradfree.benchmarks.tables.column import Cell, Column
from gradfree.benchmarks.tables.frames import pl

ENGINE = {"engine": "row"}
"""Name columns of a table with one row an engine."""
_FEWEST = 3
"""Minimal number of points of a chart."""


@dataclass(frozen=True)
class Section:
    """The results of one comparison.

    Attributes:
        title: the subject of the comparison.
        facts: all numbers, as a table of :mod:`gradfree.benchmarks.tables.facts`.
        columns: the table's columns.
        legend: the meaning of the table's signs and columns.
        setup: what was run, in sentences, if the title is not enough.
        names: the table's first columns, which name a row: heading to column of the facts.
        verdicts: one sentence a row of the table; empty if there are no verdicts by row.
        remarks: further sentences.
        charts: charts of the facts.
        answer: the conclusion in a sentence; empty if the comparison answers no question by itself.
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

    @cached_property
    def head(self) -> list[str]:
        """The table's headings."""
        return [*self.names, *(column.heading for column in self.columns)]

    @cached_property
    def rows(self) -> list[list[Cell]]:
        """The table's rows, in the order of the facts; facts without a row's names are not shown."""
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
        """The charts with enough points to be worth drawing."""
        return [chart for chart in self.charts if chart.points.height >= _FEWEST]

    @property
    def sentences(self) -> list[str]:
        """The verdicts on the rows, then the remarks."""
        lines = [
            f"{', '.join(cell.text for cell in row[: len(self.names)])}: {words}."
            for row, words in zip(self.rows, self.verdicts, strict=False)
        ]
        return [*lines, *self.remarks]
