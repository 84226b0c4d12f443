"""What the commands of ``gradfree bench`` do."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from gradfree.benchmarks.part import Suite, cases, sections
from gradfree.benchmarks.plot import save_plot
from gradfree.benchmarks.records import RecordFile
from gradfree.benchmarks.report import markdown, terminal_table
from gradfree.benchmarks.runner import count_finished, run_cases
from gradfree.benchmarks.stored import DATA_ROOT
from gradfree.benchmarks.suites import SUITES
from gradfree.cli import UsageError


def run(suite: str, out: Path | None, seeds: int, device: str, jobs: int, data: Path | None) -> None:
    """Run the cases that have no record yet, then report."""
    if data is not None:
        # The workers inherit it.
        os.environ[DATA_ROOT] = str(data)
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch finds no CUDA device here; leave out --device cuda.")
    comparisons, file = _open(suite, out)
    comparisons = tuple(p for p in comparisons if os.environ.get(DATA_ROOT) or not p.optional) or comparisons
    for part in comparisons:
        part.check()
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {file.path.parent}: {error.strerror}.") from error
    wanted = partial(cases, comparisons, seeds, device)
    listed = list(wanted(known := file.read()))
    if finished := count_finished(listed, known):
        print(f"{finished} of {len(listed)} cases are in {file.path} already: skipped.")
    try:
        run_cases(wanted, file, jobs)
    except KeyboardInterrupt:
        print(f"Interrupted. {file.path} has what is finished; the same command does the rest.", file=sys.stderr)
        raise
    _show(comparisons, file)


def report(suite: str, out: Path | None) -> None:
    """Print the tables and write them and the plot."""
    comparisons, file = _open(suite, out)
    _show(comparisons, file)


def _open(suite: str, out: Path | None) -> tuple[Suite, RecordFile]:
    if suite not in SUITES:
        raise UsageError(f"no suite is called {suite!r}; there are: {', '.join(SUITES)}.")
    return SUITES[suite], RecordFile((out or Path("results", suite)) / "records.jsonl")


def _show(comparisons: Suite, file: RecordFile) -> None:
    parts = list(sections(comparisons, file.read()))
    if not parts:
        raise UsageError(f"{file.path} has no results of this suite; `gradfree bench run` makes them.")
    console = Console()
    for section in parts:
        console.print(terminal_table(section))
        for remark in section.remarks():
            console.print(remark)
        console.print()
    folder = file.path.parent
    (folder / "report.md").write_text(markdown(parts), encoding="utf-8")
    save_plot(parts, folder / "report.png")
    console.print(f"Table: {folder / 'report.md'}  Plot: {folder / 'report.png'}  Records: {file.path}")
