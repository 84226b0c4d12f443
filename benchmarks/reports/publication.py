"""A report's files."""

from __future__ import annotations

from pathlib import Path

from gradfree.benchmarks.reports.export import export
from gradfree.benchmarks.reports.page import page
from gradfree.benchmarks.reports.report import Report
from gradfree.benchmarks.tables.plot import save_plots


def publish(report: Report, folder: Path) -> list[Path]:
    """Write ``report`` to ``folder``, as a page, as Markdown with a picture, and its numbers; return the files."""
    html, markdown, picture, csv, parquet = (
        folder / f"report.{kind}" for kind in ("html", "md", "png", "csv", "parquet")
    )
    html.write_text(page(report), encoding="utf-8")
    markdown.write_text(report.markdown(), encoding="utf-8")
    save_plots(report.sections, picture)
    export(report.sections, csv, parquet)
    return [html, markdown, picture, csv, parquet]
