"""The reports of ``gradfree bench``; imports the packages that draw them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradfree.benchmarks.records.records import Record, RecordFile
from gradfree.benchmarks.reports.publication import publish
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.running.runner import RECORDS
from gradfree.benchmarks.sweeps.axes import RunRequest, Sweep
from gradfree.benchmarks.sweeps.sweep import comparisons_of
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.cli import UsageError


def report(suite: str | None, out: Path | None) -> None:
    """Print the tables of a folder's records and write the report's files."""
    kept = RunRequest.load(out) if out and not suite else None
    request = kept or RunRequest(Sweep(), suite=suite or "quick")
    file = RecordFile((out or request.folder) / RECORDS)
    records, folder = file.read(), file.path.parent
    found = reported(comparisons_of(request), records, file, request)
    if not records:
        raise UsageError(f"{folder} has no records; create them with `gradfree bench run --out {folder}`.")
    if not found.sections:
        raise UsageError(f"{file.path} has no results of this suite; give the suite that they are from: --suite NAME.")
    show(found, file)


def reported(comparisons: Suite, records: Mapping[str, Record], file: RecordFile, request: RunRequest) -> SuiteReport:
    """Return the report on the records of ``comparisons``."""
    title = f"gradfree bench: {file.path.parent.resolve().name}"
    return replace(SuiteReport.of(title, comparisons, records), command=request.command)


def show(report: SuiteReport, file: RecordFile) -> None:
    """Write the report's files, and print its tables."""
    console, folder = Console(), file.path.parent
    # The files come first: a pipe to `head` would close the output before they are written.
    files = publish(report, folder)
    report.print(console)
    console.print(Text(f"Report: {' '.join(map(str, files))}  Records: {file.path}"))
