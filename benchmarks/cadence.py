"""What it costs in accuracy to lead weights back to orthogonal ones less often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes

from gradfree.benchmarks.depths import DepthSection, DepthSweep, Point
from gradfree.benchmarks.records import Record

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

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"optimizer steps between retractions; {super().title}"

    @property
    def legend(self) -> str:
        """Say what the signs and columns mean."""
        before, rest = super().legend.split("and in brackets ")
        return f"{before}and in brackets the largest ‖W Wᵀ - I‖ seen in any layer. {rest[rest.index('Learning') :]}"

    def cell(self, point: Point) -> str:
        """Return the figures of one cadence at one depth."""
        return f"{point.test} [{point.drift:.1e}]"

    def draw(self, top: Axes, bottom: Axes) -> None:
        """Draw score and drift against the cadence, a line for each depth."""
        task = self.part.task
        paced = {row.label: row.options[_EVERY] for row in self.part.rows if _EVERY in row.options}
        top.set_title(f"{task.name}, {task.model}, {self.device}")
        for n, depth in enumerate(self.part.depths):
            points = {label: self.curves[label][n] for label in self.curves}
            own = [points[label] for label in paced]
            means, spreads = [p.test.mean for p in own], [p.test.spread for p in own]
            top.errorbar(paced.values(), means, spreads, fmt="o-", capsize=3, label=f"{depth} hidden layers")
            bottom.plot(paced.values(), [p.drift for p in own], "o-", label=f"{depth} hidden layers")
            for label in points.keys() - paced.keys():
                style = {"linestyle": "--", "color": f"C{n}", "label": f"{label}, {depth}"}
                top.axhline(points[label].test.mean, **style)
                bottom.axhline(points[label].drift, **style)
        top.set_ylabel(f"test {task.score.name} ({task.score.unit})")
        bottom.set_ylabel("largest ‖W Wᵀ − I‖")
        bottom.set_yscale("log")
        for axes in (top, bottom):
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(paced.values()), [str(cadence) for cadence in paced.values()])
            axes.set_xlabel("optimizer steps between retractions")
            axes.legend(fontsize="small")
