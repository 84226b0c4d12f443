"""A suite's figures as tables, for the terminal and as Markdown, and what they say in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan

from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradfree.benchmarks.summary import RowSummary, Summary

LEGEND = (
    "±: sample standard deviation over seeds. ×: as a multiple of the first row's, for one training step. "
    "Cosine: between the engine's gradient and exact backpropagation's, mean over the training."
)

_MIB = 2**20


def title(summary: Summary) -> str:
    """Say what was compared."""
    task = summary.task
    return (
        f"{task.name}: {task.model}, {task.steps} steps, seeds: {summary.seeds}, "
        f"device: {summary.environment['device']}, threads: {summary.environment['threads']}"
    )


def terminal_table(summary: Summary) -> Table:
    """Return the table for the terminal."""
    head, *rows = _cells(summary)
    table = Table(title=title(summary), caption=LEGEND, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    for text, *column in zip(head, *rows, strict=True):
        # Headings wrap at every space before a figure does: the table fits into 80 columns.
        width = max(map(len, [*text.split(), *column]))
        table.add_column(text, justify="right" if table.columns else "left", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(summaries: Sequence[Summary]) -> str:
    """Return all tables and remarks as Markdown."""
    return "\n".join(line for summary in summaries for line in _markdown_section(summary))


def remarks(summary: Summary) -> Iterator[str]:
    """Yield what the figures say: which engines cost more time than the baseline, which train as well."""
    baseline, *others = summary.rows
    name, score = baseline.row.label, summary.task.score
    # Between the quartiles of the ratio it is anyone's guess.
    slower = [f"{r.row.label} ({r.ratio:.2f}×)" for r in others if r.ratio_quartiles[0] > 1]
    faster = [f"{r.row.label} ({r.ratio:.2f}×)" for r in others if r.ratio_quartiles[1] < 1]
    if slower:
        yield f"Slower than {name} per step: {', '.join(slower)}."
    if faster:
        yield f"Faster than {name} per step: {', '.join(faster)}."
    if isnan(baseline.validation.spread):
        return
    level = f"{name}'s validation {score.name} ({baseline.validation} {score.unit})"
    equal = [r.row.label for r in others if _as_good(r, baseline, summary)]
    worse = [r.row.label for r in others if r.row.label not in equal]
    if equal:
        yield f"Within one spread of {level}, or better: {', '.join(equal)}."
    if worse:
        yield f"Worse than {level} by more than its spread: {', '.join(worse)}."


def _as_good(row: RowSummary, baseline: RowSummary, summary: Summary) -> bool:
    loss = baseline.validation.mean - row.validation.mean
    if not summary.task.score.metric().higher_is_better:
        loss = -loss
    return loss <= baseline.validation.spread


def _cells(summary: Summary) -> Iterator[list[str]]:
    score = summary.task.score
    yield [
        "engine",
        f"test {score.name} ({score.unit})",
        f"validation {score.name}",
        "step time (×)",
        "peak memory (MiB)",
        "peak memory (×)",
        "cosine",
    ]
    baseline = summary.rows[0]
    for row in summary.rows:
        figures = [f"{row.ratio:.2f}", f"{row.memory / _MIB:.1f}", f"{row.memory / baseline.memory:.2f}"]
        cells = [str(row.test), str(row.validation), *figures, f"{row.cosine:.3f}"]
        yield [row.row.label, *(cell.replace("nan", "–") for cell in cells)]


def _markdown_section(summary: Summary) -> Iterator[str]:
    head, *rows = _cells(summary)
    yield f"### {title(summary)}"
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
    yield LEGEND
    yield ""
    for remark in remarks(summary):
        yield f"- {remark}"
    yield ""
