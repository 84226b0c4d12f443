"""A report's tables, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradfree.benchmarks.section import Section


def terminal_table(section: Section) -> Table:
    """Return the table for the terminal."""
    head, *rows = section.cells()
    table = Table(title=section.title, caption=section.legend, box=SIMPLE_HEAD, padding=0)
    table.title_justify = table.caption_justify = "left"
    for text, *column in zip(head, *rows, strict=True):
        # Headings wrap at every space before a figure does: the table fits into 80 columns.
        width = max(map(len, [*text.split(), *column]))
        table.add_column(text, justify="right" if table.columns else "left", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(sections: Sequence[Section]) -> str:
    """Return all tables and remarks as Markdown."""
    return "\n".join(line for section in sections for line in _markdown_section(section))


def _markdown_section(section: Section) -> Iterator[str]:
    head, *rows = section.cells()
    yield f"### {section.title}"
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
    yield section.legend
    yield ""
    for remark in section.remarks():
        yield f"- {remark}"
    yield ""
