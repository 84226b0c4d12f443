"""A report's files."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from gradfree.benchmarks.reports.drawing import picture
from gradfree.benchmarks.reports.page import page
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.cli import UsageError


def publish(report: SuiteReport, folder: Path) -> list[Path]:
    """Write ``report`` to ``folder``, as a page, as Markdown with a picture, and its facts; return the files.

    Without a chart there is no picture. Either all files are new or none is.

    Raises:
        UsageError: they cannot be written; the disk is full, say.
    """
    try:
        with TemporaryDirectory(dir=folder) as aside:
            written = _write(report, Path(aside))
            (folder / "report.png").unlink(missing_ok=True)
            return [file.replace(folder / file.name) for file in written]
    except OSError as error:
        raise UsageError(f"no report can be written to {folder}: {error.strerror}. Records are kept.") from error


def _write(report: SuiteReport, folder: Path) -> list[Path]:
    html, markdown, png, csv, parquet = (folder / f"report.{kind}" for kind in ("html", "md", "png", "csv", "parquet"))
    html.write_text(page(report), encoding="utf-8")
    markdown.write_text(report.markdown(), encoding="utf-8")
    if charts := [chart for section in report.sections for chart in section.charts]:
        png.write_bytes(picture(charts))
    report.facts.write_csv(csv)
    report.facts.write_parquet(parquet)
    return [html, markdown, *([png] if charts else []), csv, parquet]
