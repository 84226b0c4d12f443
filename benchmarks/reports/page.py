"""A report as one HTML file that needs nothing else: no network, no fonts, and the scripts that draw are in it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import vl_convert
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradfree.benchmarks.reports.drawing import spec
from gradfree.benchmarks.reports.looks import Looks
from gradfree.benchmarks.reports.report import SuiteReport, is_prose

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def page(report: SuiteReport) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    looks = Looks()
    charts = [[spec(chart, looks) for chart in section.charts] for section in report.sections]
    answers = [(section, report.sections.index(section)) for section in report.answers]
    return environment.get_template(_TEMPLATE.name).render(
        report=report, charts=charts, answers=answers, kind=_kind, libraries=_libraries() if any(charts) else ""
    )


@cache
def _libraries() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed in one script."""
    return Markup(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def _kind(text: str, is_label: bool) -> str:
    """Return the style class of a table's cell."""
    if is_label:
        return "label"
    return "words" if is_prose(text) else "figure"
