"""A report's files. The page is self-contained: it needs no network and no fonts, and includes its scripts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradfree.benchmarks.reports.drawing import spec, styles
from gradfree.benchmarks.reports.report import SuiteReport, is_prose
from gradfree.cli import UsageError

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def page(report: SuiteReport) -> str:
    """Return the report as HTML."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    known = styles(chart for section in report.sections for chart in section.drawn)
    charts = [[spec(chart, known) for chart in section.drawn] for section in report.sections]
    libraries = _libraries() if any(charts) else ""
    return environment.get_template(_TEMPLATE.name).render(
        report=report, charts=charts, is_prose=is_prose, libraries=Markup(libraries)
    )


@cache
def _libraries() -> str:
    """Return Vega, Vega-Lite and Vega-Embed in one script, which takes a second to make."""
    libraries: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return libraries


def publish(report: SuiteReport, folder: Path) -> list[Path]:
    """Write the report to ``folder`` as HTML and Markdown, and its facts as CSV and Parquet; return the files.

    Raises:
        UsageError: they cannot be written, for example because the disk is full.
    """
    html, markdown, csv, parquet = (folder / f"report.{kind}" for kind in ("html", "md", "csv", "parquet"))
    try:
        html.write_text(page(report), encoding="utf-8")
        markdown.write_text(report.markdown(), encoding="utf-8")
        report.facts.write_csv(csv)
        report.facts.write_parquet(parquet)
    except OSError as error:
        raise UsageError(f"cannot write the report to {folder}: {error.strerror}. Records are kept.") from error
    return [html, markdown, csv, parquet]
