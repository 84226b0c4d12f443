"""A report's picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from gradfree.benchmarks.section import Section


def save_plot(sections: Sequence[Section], path: Path) -> None:
    """Draw one column of two plots a section."""
    figure = Figure(figsize=(6 * len(sections), 8), layout="constrained")
    axes = figure.subplots(2, len(sections), squeeze=False)
    for section, (top, bottom) in zip(sections, axes.T, strict=True):
        section.draw(top, bottom)
    figure.savefig(path, dpi=120)
