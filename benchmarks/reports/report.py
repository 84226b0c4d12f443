"""A report: its sections and the environments of its records, for the terminal and as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.experiment import Suite, devices_of, findings, records_of
from gradfree.benchmarks.tables.facts import SCHEMA, table
from gradfree.benchmarks.tables.section import Section
from gradfree.wording import count

_PROSE = 24
"""A cell with more characters than this is text, not a figure."""
_NAMED = 3
"""How many differing versions or commits a warning names; all are in the last lines of the report."""
_WIDEST = 1000
"""Width of a terminal in which every table has room."""
_SIGNS = re.compile(r"[\\`*<|]|\[(?=[^\]]*\]\()|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
"""Characters that have a meaning in Markdown and must be escaped."""


@dataclass(frozen=True)
class SuiteReport:
    """The report on some records.

    Attributes:
        title: the report's title.
        sections: one section for each comparison.
        records: the records, for their environments.
        command: the command that made them, if known.
        code: code to paste, if there is a recommendation.
        unfinished: sentences on experiments that wait for trials of learning rates.
    """

    title: str
    sections: Sequence[Section]
    records: Sequence[Record]
    command: str = ""
    code: str = ""
    unfinished: Sequence[str] = ()

    @classmethod
    def of(cls, title: str, suite: Suite, records: Mapping[str, Record], command: str = "") -> SuiteReport:
        """Return the report on ``suite``, given all ``records`` by case id."""
        own = {record["case"]: record for record in records_of(suite, records)}
        sections = [experiment.section(facts) for experiment, facts in findings(suite, own)]
        return cls(title, sections, list(own.values()), command, unfinished=list(_unfinished(suite, own)))

    @property
    def answers(self) -> list[Section]:
        """The sections with an answer."""
        return [section for section in self.sections if section.answer]

    @property
    def facts(self) -> pl.DataFrame:
        """All numbers, each with the title of its section."""
        titled = [s.facts.select(pl.lit(s.title).alias("section"), *SCHEMA) for s in self.sections]
        return pl.concat([table([]).select(pl.lit("").alias("section"), *SCHEMA), *titled])

    def print(self, console: Console) -> None:
        """Print the answers, then tables and sentences."""
        for section in self.answers:
            console.print(Text(section.answer, "bold"))
        if self.code:
            console.print(Text(f"\n    {self.code}"), soft_wrap=True)
        console.print()
        for section in self.sections:
            print_section(section, console)
        for warning in self.warnings:
            console.print(Text(f"Warning: {warning}", "bold yellow"))
        for line in self.made:
            console.print(Text(line, "dim"))

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = [f"- **{_escaped(section.answer)}**" for section in self.answers]
        lines += ["" for _ in lines[:1]]
        lines += [f"```python\n{self.code}\n```\n"] if self.code else []
        lines += [line for section in self.sections for line in _markdown_section(section)]
        lines += [f"**{_escaped(warning)}**\n" for warning in self.warnings]
        return "\n".join([*lines, "Measured:\n", *(f"- {line}" for line in self.made), ""])

    @property
    def made(self) -> Iterator[str]:
        """One line for each environment, with its number of records and their dates, and one with the command."""
        days: dict[str, list[str]] = {}
        for record in self.records:
            environment = ", ".join(f"{name} {value}" for name, value in _environment(record).items())
            days.setdefault(environment, []).append(record["timestamp"][:10])
        for environment, found in days.items():
            when = " to ".join(dict.fromkeys([min(found), max(found)]))
            yield f"{count(len(found), 'record')}, {when}: {environment}"
        if self.command:
            yield f"by: {self.command}"

    @property
    def warnings(self) -> Iterator[str]:
        """A warning for each unfinished experiment, each failed case, and each difference between environments.

        The device may differ: each section has one, so nothing is mixed.
        """
        yield from self.unfinished
        for record in self.records:
            if error := error_of(record):
                # Without the digest of the id.
                name = record["case"].rpartition("/")[0]
                yield f"{name} failed and counts as missing: {error}."
        environments = [_environment(record) for record in self.records]
        for name in dict.fromkeys(name for environment in environments for name in environment):
            values = Counter(environment.get(name, "unknown") for environment in environments)
            if len(values) > 1 and name != "device":
                named = list(values.items())[: _NAMED if len(values) > _NAMED + 1 else None]
                shares = ", ".join(f"{value} ({count(number, 'record')})" for value, number in named)
                shares += f" and {len(values) - len(named)} others" if len(named) < len(values) else ""
                yield f"The records mix environments, {name}: {shares}."


def _unfinished(suite: Suite, records: Mapping[str, Record]) -> Iterator[str]:
    """Yield a sentence on each experiment that was cut in its trials of learning rates."""
    for device in devices_of(records):
        for experiment in suite:
            trials = list(experiment.trials(device))
            done = sum(trial.id in records for trial in trials)
            if done and (done < len(trials) or experiment.facts(records, device).is_empty()):
                yield (
                    f"{trials[0].topic}: {done} of {len(trials)} trials of learning rates have run; training follows "
                    "when all have. The same command continues."
                )


def _environment(record: Record) -> dict[str, str]:
    """Return the environment of a record as text, with commit and uncommitted changes in one entry."""
    environment = dict(record["environment"])
    commit, dirty = environment.pop("commit", None), environment.pop("dirty", None)
    if commit is not None:
        environment["commit"] = commit[:7] + (" with uncommitted changes" if dirty else "")
    return {name: str(value) for name, value in environment.items()}


def print_section(section: Section, console: Console) -> None:
    """Print a section: its table, whose lines may be longer than the terminal's, and its sentences."""
    console.print(Text(section.title, "bold"))
    drawn = _table(section)
    least = console.measure(drawn, options=console.options.update_width(_WIDEST)).minimum
    drawn.width = least if least > console.width else None
    console.print(drawn, crop=False)
    if section.setup:
        console.print(Text(section.setup))
    console.print(Text(section.legend, "italic"))
    for sentence in section.sentences:
        console.print(Text(f"• {sentence}"))
    console.print()


def texts(section: Section) -> list[list[str]]:
    """Return the texts of a section's cells, row by row."""
    return [[cell.text for cell in row] for row in section.rows]


def _table(section: Section) -> Table:
    """Return the table for the terminal; headings and text wrap, figures do not."""
    drawn, rows = Table(box=SIMPLE_HEAD, padding=0), texts(section)
    for n, heading in enumerate(section.head):
        cells, names_a_row = [row[n] for row in rows], n < len(section.names)
        wraps = names_a_row or any(map(is_prose, cells))
        width = max(map(len, [*heading.split(), *cells]))
        fitted: dict[str, Any] = {"max_width": width} if wraps else {"justify": "right", "width": width}
        if names_a_row:  # Names break between words only.
            fitted["min_width"] = max(len(word) for cell in (heading, *cells) for word in cell.split())
        drawn.add_column(Text(heading), overflow="fold", **fitted)
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def is_prose(cell: str) -> bool:
    """Return whether a cell is text that may be wrapped, and not a figure."""
    return len(cell) > _PROSE


def _markdown_section(section: Section) -> Iterator[str]:
    yield f"### {_escaped(section.title)}"
    yield ""
    yield _markdown_row(section.head)
    yield "|" + "---|" * len(section.names) + "---:|" * len(section.columns)
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
