"""What it costs in accuracy to lead weights back to orthogonal ones less often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from gradfree.benchmarks.depths import DepthSection, DepthSweep, Point
from gradfree.benchmarks.drawing import add_legend, count_axis, style
from gradfree.benchmarks.records import Record
from gradfree.benchmarks.section import Plots

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

    def _draw_scores(self, axes: Axes) -> None:
        for n, depth in enumerate(self.part.depths):
            scores = [self.curves[label][n].score for label in self._cadences]
            means, margins = [score.mean for score in scores], [score.margin for score in scores]
            cadences, label = list(self._cadences.values()), f"{depth} hidden layers"
            axes.errorbar(cadences, means, margins, linestyle="-", capsize=3, label=label, **style(n))
            self._draw_levels(axes, n, lambda point: point.score.mean)
        axes.set_ylabel(f"test {self.part.task.score.name} ({self.part.task.score.unit})")
        self._finish(axes)

    def _draw_drift(self, axes: Axes) -> None:
        for n, depth in enumerate(self.part.depths):
            drifts = [self.curves[label][n].drift for label in self._cadences]
            axes.plot(list(self._cadences.values()), drifts, label=f"{depth} hidden layers", **style(n))
            self._draw_levels(axes, n, lambda point: point.drift)
        axes.set_ylabel("largest ‖W Wᵀ − I‖ (spectral norm)")
        axes.set_yscale("log")
        self._finish(axes)

    def _draw_levels(self, axes: Axes, n: int, figure: Callable[[Point], float]) -> None:
        """Draw the rows without a cadence, at the ``n``-th depth."""
        for label in self.curves.keys() - self._cadences.keys():
            name = f"{label}, {list(self.part.depths)[n]}"
            axes.axhline(figure(self.curves[label][n]), linestyle="--", color=style(n)["color"], label=name)

    def _finish(self, axes: Axes) -> None:
        count_axis(axes, list(self._cadences.values()), "optimizer steps between retractions (count)")
        add_legend(axes)

    @property
    def _cadences(self) -> dict[str, int]:
        """The rows that have one, by label."""
        return {row.label: row.options[_EVERY] for row in self.part.rows if _EVERY in row.options}
