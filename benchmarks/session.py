"""What the commands of ``gradfree bench`` do."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from gradfree.benchmarks.compare import compare as compare_records
from gradfree.benchmarks.compare import environment_changes, read_records
from gradfree.benchmarks.part import Suite, cases
from gradfree.benchmarks.publication import publish
from gradfree.benchmarks.records import RecordFile
from gradfree.benchmarks.report import Report, print_section
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
    comparisons = tuple(part for part in comparisons if os.environ.get(DATA_ROOT) or not part.optional)
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
    """Print the tables and write the report's files."""
    comparisons, file = _open(suite, out)
    _show(comparisons, file)


def _open(suite: str, out: Path | None) -> tuple[Suite, RecordFile]:
    if suite not in SUITES:
        raise UsageError(f"no suite is called {suite!r}; there are: {', '.join(SUITES)}.")
    return SUITES[suite], RecordFile((out or Path("results", suite)) / "records.jsonl")


def compare(a: Path, b: Path) -> None:
    """Print what two sets of records have in common and in what they differ."""
    console, before, after = Console(), read_records(a), read_records(b)
    console.print(Text(f"a: {a}\nb: {b}\n"))
    for section in compare_records(before, after):
        print_section(section, console)
    for change in environment_changes(before, after):
        console.print(Text(change, "bold yellow"))


def _show(comparisons: Suite, file: RecordFile) -> None:
    report = Report.of(f"gradfree bench: {file.path.parent.resolve().name}", comparisons, file.read())
    if not report.sections:
        raise UsageError(f"{file.path} has no results of this suite; `gradfree bench run` makes them.")
    console = Console()
    report.print(console)
    files = publish(report, file.path.parent)
    console.print(Text(f"Report: {' '.join(map(str, files))}  Records: {file.path}"))
