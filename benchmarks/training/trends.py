"""How time and memory of a step grow with one setting of a task, where several comparisons differ in nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isnan, nan
from typing import Any

from matplotlib.axes import Axes

from gradfree.benchmarks.tables.drawing import Styles, add_legend, count_axis, draw_curves, log_axis
from gradfree.benchmarks.tables.estimates import Bar
from gradfree.benchmarks.tables.section import Plots, Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.row_summary import RowSummary
from gradfree.benchmarks.training.summary import Summary

_NAME = "name"
"""The setting in which tasks always differ."""
_OF_A_STEP = ("batch_size", "data.", "options.")
"""What the settings begin with that a step's cost may depend on."""

_FOLLOWERS = {"data.length": "options.context"}
"""Settings that another one entails."""


def trends(sections: Sequence[Section]) -> Iterator[TrendSection]:
    """Yield a section for each setting with several timed values, and on each device, in the most of ``sections``."""
    timed = [s for s in sections if isinstance(s, Summary) and any(map(_is_timed, s.rows))]
    groups: defaultdict[tuple[str, Hashable], dict[int, Summary]] = defaultdict(dict)
    for summary in timed:
        settings = dict(_settings(summary.task))
        for axis, value in settings.items():
            if axis.startswith(_OF_A_STEP) and isinstance(value, int) and value > 0:
                ignored = {axis, _NAME, _FOLLOWERS.get(axis)}
                others = frozenset((name, repr(other)) for name, other in settings.items() if name not in ignored)
                groups[axis, (summary.device, others)][value] = summary
    largest: dict[tuple[str, str], dict[int, Summary]] = {}
    for (axis, _), group in groups.items():
        device = next(iter(group.values())).device
        if len(group) > max(1, len(largest.get((axis, device), ()))):
            largest[axis, device] = group
    for (axis, _), group in largest.items():
        yield TrendSection(axis.rpartition(".")[2].replace("_", " "), dict(sorted(group.items())))


def _settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings of a task, by path."""
    if is_dataclass(value):
        inner: Mapping[str, Any] = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        inner = value
    else:
        yield path, value
        return
    for name, setting in inner.items():
        yield from _settings(setting, f"{path}.{name}" if path else name)


@dataclass(frozen=True)
class TrendSection(Section):
    """Time and memory by one setting of a task."""

    axis: str
    summaries: Mapping[int, Summary]

    @property
    def _task(self) -> Task:
        return next(iter(self.summaries.values())).task

    @property
    def title(self) -> str:
        """Say what was compared."""
        device = next(iter(self.summaries.values())).device
        return f"cost against {self.axis}: {self._task.model}, from {self._task.name}, device: {device}"

    @property
    def legend(self) -> str:
        """Say what the figures are."""
        return f"Columns: {self.axis}. Time of a training step in ms, median, and in brackets its peak memory in MiB."

    @property
    def _curves(self) -> dict[str, dict[int, RowSummary]]:
        """What is known of each engine by the setting's value."""
        curves: defaultdict[str, dict[int, RowSummary]] = defaultdict(dict)
        for value, summary in self.summaries.items():
            for row in summary.rows:
                if _is_timed(row):
                    curves[row.label][value] = row
        return curves

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row an engine."""
        yield ["engine", *map(str, self.summaries)]
        for label, rows in self._curves.items():
            yield [label, *(_cell(rows[value]) if value in rows else "–" for value in self.summaries)]

    def plots(self) -> Plots:
        """Return what draws time and memory."""
        where = f"{self._task.model}, {next(iter(self.summaries.values())).device}"
        return {
            f"{where}: time against {self.axis}": self._draw_times,
            f"{where}: memory against {self.axis}": self._draw_memory,
        }

    def _draw_times(self, axes: Axes, styles: Styles) -> None:
        self._draw(axes, styles, lambda row: (1e3 * row.time).bar, "time of a step (ms)")

    def _draw_memory(self, axes: Axes, styles: Styles) -> None:
        self._draw(axes, styles, lambda row: (row.mebibytes, nan, nan), "peak memory of a step (MiB)")

    def _draw(self, axes: Axes, styles: Styles, figure: Callable[[RowSummary], Bar], name: str) -> None:
        known = self._curves.items()
        draw_curves(axes, {label: {value: figure(row) for value, row in rows.items()} for label, rows in known}, styles)
        log_axis(axes, name)
        count_axis(axes, list(self.summaries), f"{self.axis} (count)")
        add_legend(axes)


def _is_timed(row: RowSummary) -> bool:
    return not isnan(row.time.median)


def _cell(row: RowSummary) -> str:
    return f"{1e3 * row.time.median:.1f} [{row.mebibytes:.1f}]"
