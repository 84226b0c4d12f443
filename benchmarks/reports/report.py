"""A report: its sections and the provenance of its records, for the terminal and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradfree.benchmarks.records.provenance import Provenance
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.chart import Chart
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.experiment import Suite, findings, records_of
from gradfree.benchmarks.tables.facts import SCHEMA, fact, table
from gradfree.benchmarks.tables.section import Section

_PROSE = 24
"""A cell with more characters than this is text, not a figure."""
_SIGNS = re.compile(r"[\\`*<|]|\[(?=[^\]]*\]\()|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
"""Characters that have a meaning in Markdown and must be escaped."""


@dataclass(frozen=True)
class SuiteReport:
    """The report on some records.

    Attributes:
        title: the report's title.
        sections: one section for each comparison.
        provenance: the provenance of the records.
        command: the command that made them, if known.
        code: code to paste, if there is a recommendation.
    """

    title: str
    sections: Sequence[Section]
    provenance: Provenance
    command: str = ""
    code: str = ""

    @classmethod
    def of(cls, title: str, suite: Suite, records: Mapping[str, Record]) -> SuiteReport:
        """Return the report on ``suite``, given all ``records`` by case id."""
        own = records_of(suite, records)
        return cls(title, sections(suite, {record["case"]: record for record in own}), Provenance(own))

    @property
    def answers(self) -> list[Section]:
        """The sections with an answer."""
        return [section for section in self.sections if section.answer]

    @property
    def charts(self) -> list[Chart]:
        """All charts that are drawn."""
        return [chart for section in self.sections for chart in section.drawn]

    @property
    def facts(self) -> pl.DataFrame:
        """All numbers, each with the title of its section."""
        return pl.concat([s.facts.select(pl.lit(s.title).alias("section"), *SCHEMA) for s in self.sections])

    def print(self, console: Console) -> None:
        """Print the answers, then tables and sentences."""
        for section in self.answers:
            console.print(Text(section.answer, "bold"))
        if self.code:
            console.print(Text(f"\n    {self.code}"), soft_wrap=True)
        console.print()
        for section in self.sections:
            print_section(section, console)
        for warning in self.provenance.warnings():
            console.print(Text(f"Warning: {warning}", "bold yellow"))
        for line in self._made:
            console.print(Text(line, "dim"))

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [f"- **{_escaped(section.answer)}**" for section in self.answers]
        lines += ["" for _ in lines[:1]]
        lines += [f"```python\n{self.code}\n```\n"] if self.code else []
        lines += [line for section in self.sections for line in _markdown_section(section)]
        lines += [f"**{warning}**\n" for warning in self.provenance.warnings()]
        return "\n".join([*lines, "Measured:\n", *(f"- {line}" for line in self._made), ""])

    @property
    def _made(self) -> list[str]:
        """Lines on the records' provenance and the command."""
        return [*self.provenance.lines(), *([f"by: {self.command}"] if self.command else [])]


def sections(suite: Suite, records: Mapping[str, Record]) -> list[Section]:
    """Return a section for each device and experiment that has results in the suite's ``records``.

    If cases failed, the last section lists them.
    """
    found = list(findings(suite, records))
    failed = [record for record in records.values() if error_of(record)]
    return [
        *(experiment.section(facts) for experiment, facts in found),
        *([_failure_section(failed)] if failed else []),
    ]


def _failure_section(failed: Sequence[Record]) -> Section:
    """Return the section that lists failed cases and their errors."""
    # Without the digest of the id.
    errors = [
        fact("error", "", row=r["case"].rpartition("/")[0], device=r["config"]["device"], note=error_of(r))
        for r in failed
    ]
    return Section(
        title="failed cases",
        facts=table(errors),
        columns=[column("error", "error")],
        legend="They count as missing everywhere else: no mean and no interval includes them.",
        names={"case": "row"},
    )


def print_section(section: Section, console: Console) -> None:
    """Print a section: its table, split into pieces that fit the terminal's width, and its sentences."""
    console.print(Text(section.title, "bold"))
    for piece in _tables(section, console.width):
        console.print(piece)
    if section.setup:
        console.print(Text(section.setup))
    console.print(Text(section.legend, "italic"))
    for sentence in section.sentences:
        console.print(Text(f"• {sentence}"))
    console.print()


def texts(section: Section) -> list[list[str]]:
    """Return the texts of a section's cells, row by row."""
    return [[cell.text for cell in row] for row in section.rows]


def _tables(section: Section, width: int) -> Iterator[Table]:
    columns = list(zip(section.head, *texts(section), strict=True))
    names, columns = columns[: section.labels], columns[section.labels :]
    room = width - 1 - sum(1 + _width(cells) for cells in names)
    while columns:
        used = list(accumulate(1 + _width(cells) for cells in columns))
        # A column wider than the terminal is left to rich.
        fitting = max(1, sum(total <= room for total in used))
        yield _table(names, columns[:fitting])
        columns = columns[fitting:]


def _table(names: Sequence[Sequence[str]], columns: Sequence[Sequence[str]]) -> Table:
    drawn = Table(box=SIMPLE_HEAD, padding=0)
    for cells in names:
        drawn.add_column(Text(cells[0]), max_width=_width(cells), overflow="fold")
    for cells in columns:
        if any(map(is_prose, cells[1:])):
            drawn.add_column(Text(cells[0]), overflow="fold")
        else:
            drawn.add_column(Text(cells[0]), justify="right", width=_width(cells))
    _, *rows = zip(*names, *columns, strict=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _width(cells: Sequence[str]) -> int:
    """Return the width of a column whose heading may wrap at spaces, but whose cells may not."""
    return max(map(len, [*cells[0].split(), *cells[1:]]))


def is_prose(cell: str) -> bool:
    """Return whether a cell is text that may be wrapped, and not a figure."""
    return len(cell) > _PROSE


def _markdown_section(section: Section) -> Iterator[str]:
    yield f"### {_escaped(section.title)}"
    yield ""
    yield _markdown_row(section.head)
    yield "|" + "---|" * section.labels + "---:|" * (len(section.head) - section.labels)
    yield from map(_markdown_row, texts(section))
    yield ""
    if section.setup:
        yield _escaped(section.setup)
        yield ""
    yield _escaped(section.legend)
    yield ""
    for sentence in section.sentences:
        yield f"- {_escaped(sentence)}"
    yield ""


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |"


def _escaped(text: str) -> str:
    """Return ``text`` escaped for Markdown; underscores inside words, as in ``highway_bp``, need no escape."""
    return _SIGNS.sub(lambda found: "\\" + found[0], " ".join(text.split()))
