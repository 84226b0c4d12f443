"""The reports of ``gradfree bench``; imports the packages that draw them."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.publication import publish
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.running.runner import RECORDS
from gradfree.benchmarks.suites.index import suite_name
from gradfree.benchmarks.sweeps.axes import RunRequest, Sweep
from gradfree.benchmarks.sweeps.sweep import comparisons_of
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.cli import UsageError


def report(suite: str | None, out: Path | None) -> None:
    """Print the tables of a folder's records and write the report's files."""
    kept = RunRequest.load(out) if out and not suite else None
    request = kept or RunRequest(Sweep(), suite=suite_name(suite))
    folder = out or request.folder
    file = RecordFile(folder / RECORDS)
    if write_report(comparisons_of(request), file, request):
        return
    if not file.read():
        raise UsageError(f"{folder} has no records; create them with `gradfree bench run --out {folder}`.")
    raise UsageError(f"{file.path} has no results of this suite; give the suite that they are from: --suite NAME.")


def write_report(comparisons: Suite, file: RecordFile, request: RunRequest) -> bool:
    """Write the report's files, and print its tables; return whether the file has results of ``comparisons``."""
    console, folder = Console(), file.path.parent
    title = f"gradfree bench: {folder.resolve().name}"
    report = SuiteReport.of(title, comparisons, file.read(), request.command)
    if not report.records:
        return False
    # The files come first: a pipe to `head` would close the output before they are written.
    files = publish(report, folder)
    report.print(console)
    console.print(Text(f"Report: {' '.join(map(str, files))}  Records: {file.path}"))
    return True
