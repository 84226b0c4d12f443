"""A report's picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from matplotlib.figure import Figure

from gradfree.benchmarks.section import Section

_COLUMNS = 4


def save_plot(sections: Sequence[Section], path: Path) -> None:
    """Draw two plots a section, one above the other, and some sections side by side."""
    columns = min(len(sections), _COLUMNS)
    rows = ceil(len(sections) / columns)
    figure = Figure(figsize=(6 * columns, 8 * rows), layout="constrained")
    for section, panel in zip(sections, figure.subfigures(rows, columns, squeeze=False).flat, strict=False):
        section.draw(*panel.subplots(2))
    figure.savefig(path, dpi=120)
