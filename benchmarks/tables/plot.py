"""The plots of a report, each by itself or all in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradfree.benchmarks.tables.drawing import Styles
from gradfree.benchmarks.tables.printed import Draw, PrintedSection

_WIDTH, _HEIGHT = 7.5, 4.2
"""Of a plot, in inches."""
_FEW = 8
"""Plots up to which two stand side by side; of more, four."""


def save_plots(sections: Sequence[PrintedSection], path: Path) -> None:
    """Draw all plots of some sections, two or four side by side."""
    plots = [plot for section in sections for plot in section.plots().items()]
    columns = 2 if len(plots) <= _FEW else 4
    rows = max(1, ceil(len(plots) / columns))
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    styles = Styles()
    for axes, (title, draw) in zip(grid, plots, strict=False):
        _draw(axes, title, draw, styles)
    for axes in grid[len(plots) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=100)


def svg(title: str, draw: Draw, styles: Styles) -> bytes:
    """Return one plot as SVG: the same everywhere, as letters are drawn, and whenever, as nothing in it is random."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    _draw(figure.subplots(), title, draw, styles)
    file = BytesIO()
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _draw(axes: Axes, title: str, draw: Draw, styles: Styles) -> None:
    draw(axes, styles)
    axes.set_title(title, fontsize="medium", loc="left")
