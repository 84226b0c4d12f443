"""A report's files."""

from __future__ import annotations

from pathlib import Path

from gradfree.benchmarks.reports.drawing import picture
from gradfree.benchmarks.reports.page import page
from gradfree.benchmarks.reports.report import SuiteReport


def publish(report: SuiteReport, folder: Path) -> list[Path]:
    """Write ``report`` to ``folder``, as a page, as Markdown with a picture, and its facts; return the files.

    Without a chart there is no picture.
    """
    html, markdown, png, csv, parquet = (folder / f"report.{kind}" for kind in ("html", "md", "png", "csv", "parquet"))
    html.write_text(page(report), encoding="utf-8")
    markdown.write_text(report.markdown(), encoding="utf-8")
    charts = [chart for section in report.sections for chart in section.charts]
    if charts:
        png.write_bytes(picture(charts))
    else:
        png.unlink(missing_ok=True)
    report.facts.write_csv(csv)
    report.facts.write_parquet(parquet)
    return [html, markdown, *([png] if charts else []), csv, parquet]
