"""A report as one HTML file that needs nothing else: no network, no fonts, no scripts."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gradfree.benchmarks.reports.report import Report, is_prose
from gradfree.benchmarks.tables.drawing import Styles
from gradfree.benchmarks.tables.plot import svg
from gradfree.benchmarks.tables.section import Draw

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def page(report: Report) -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template(_TEMPLATE.name)
    return template.render(report=report, picture=partial(_picture, styles=Styles()), kind=_kind)


def _picture(title: str, draw: Draw, styles: Styles) -> str:
    return b64encode(svg(title, draw, styles)).decode()


def _kind(cell: str, is_label: bool) -> str:
    """Return the style class of a table's cell."""
    if is_label:
        return "label"
    return "words" if is_prose(cell) else "figure"
