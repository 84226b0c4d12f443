"""What it costs in accuracy to lead weights back to orthogonal ones less often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan

from matplotlib.axes import Axes

from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import (
    Styles,
    add_legend,
    count_axis,
    draw_curves,
    draw_level,
    log_axis,
    score_axis,
)
from gradfree.benchmarks.tables.estimates import Bar
from gradfree.benchmarks.tables.section import Plots
from gradfree.benchmarks.training.depths import DepthSection, DepthSweep, Point

_EVERY = "orthogonalize_every"


@dataclass(frozen=True)
class Cadences(DepthSweep):
    """An engine with several values of ``orthogonalize_every``, or without it, at several depths."""

    def section(self, records: Mapping[str, Record], device: str) -> CadenceSection | None:
        """Return the figures of the runs on ``device``."""
        found = super().section(records, device)
        return CadenceSection(self, found.curves, device) if found else None


@dataclass(frozen=True)
class CadenceSection(DepthSection):
    """Scores and drift of an engine by cadence and depth."""

    bracket = "the largest ‖W Wᵀ - I‖ seen in any layer"

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"optimizer steps between retractions; {super().title}"

    def bracketed(self, point: Point) -> str:
        """Return what stands in brackets."""
        return f"{point.drift:.1e}"

    def plots(self) -> Plots:
        """Return what draws score and drift against the cadence, a line for each depth."""
        where = f"{self.part.task.name}, {self.device}"
        return {
            f"{where}: {self.part.task.score.name} against cadence": self._draw_scores,
            f"{where}: drift against cadence": self._draw_drift,
        }

    def _draw_scores(self, axes: Axes, styles: Styles) -> None:
        self._draw(axes, styles, lambda point: point.score.bar)
        score_axis(axes, "test", self.part.task.score)

    def _draw_drift(self, axes: Axes, styles: Styles) -> None:
        self._draw(axes, styles, lambda point: (point.drift, nan, nan))
        log_axis(axes, "largest ‖W Wᵀ − I‖ (spectral norm)")

    def _draw(self, axes: Axes, styles: Styles, figure: Callable[[Point], Bar]) -> None:
        """Draw a line for each depth, and rows without a cadence as levels."""
        names = [f"{depth} hidden layers" for depth in self.part.depths]
        lines = {
            name: {every: figure(self.curves[label][n]) for label, every in self._cadences.items()}
            for n, name in enumerate(names)
        }
        draw_curves(axes, lines, styles)
        for n, look in enumerate(styles(names).values()):
            for label in self.curves.keys() - self._cadences.keys():
                value, _, _ = figure(self.curves[label][n])
                draw_level(axes, value, f"{label}, {names[n]}", look)
        count_axis(axes, list(self._cadences.values()), "optimizer steps between retractions (count)")
        add_legend(axes)

    @property
    def _cadences(self) -> dict[str, int]:
        """The rows that have one, by label."""
        return {row.label: row.options[_EVERY] for row in self.part.rows if _EVERY in row.options}
