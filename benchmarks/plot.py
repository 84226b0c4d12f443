"""A suite's figures as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradfree.benchmarks.summary import RowSummary, Summary


def save_plot(summaries: Sequence[Summary], path: Path) -> None:
    """Draw one column a summary: the score against the step time, the gradients' error against k."""
    figure = Figure(figsize=(6 * len(summaries), 8), layout="constrained")
    axes = figure.subplots(2, len(summaries), squeeze=False)
    for summary, (top, bottom) in zip(summaries, axes.T, strict=True):
        top.set_title(f"{summary.task.name}, {summary.task.model}, {summary.seeds} seeds, {summary.device}")
        _draw_scores(top, summary)
        _draw_errors(bottom, summary)
    figure.savefig(path, dpi=120)


def _draw_scores(axes: Axes, summary: Summary) -> None:
    baseline, score = summary.rows[0], summary.task.score
    low, high = baseline.test.mean - baseline.test.spread, baseline.test.mean + baseline.test.spread
    axes.axhspan(low, high, color="0.93", label=f"{baseline.row.label}, mean ± spread over seeds")
    for i, (label, rows) in enumerate(_series(summary).items()):
        _draw_points(axes, rows, label, f"C{i}")
    better = "higher" if score.metric().higher_is_better else "lower"
    axes.set_xlabel(f"step time, as a multiple of {baseline.row.label}'s")
    axes.set_ylabel(f"test {score.name} ({score.unit}), {better} is better")
    axes.margins(x=0.1)
    axes.legend()


def _draw_points(axes: Axes, rows: Sequence[RowSummary], label: str, color: str) -> None:
    times, scores = [r.ratio for r in rows], [r.test.mean for r in rows]
    time_errors = np.abs(np.transpose([r.ratio_quartiles for r in rows]) - times)
    axes.plot(times, scores, color=color, alpha=0.3)
    axes.errorbar(times, scores, [r.test.spread for r in rows], time_errors, "o", capsize=3, color=color, label=label)
    for r in rows:
        if (k := _iterations(r)) is not None:
            axes.annotate(f"k={k}", (r.ratio, r.test.mean), (6, 6), textcoords="offset points")


def _draw_errors(axes: Axes, summary: Summary) -> None:
    for i, (label, rows) in enumerate(_series(summary).items()):
        points = [(k, r.relative_error) for r in rows if (k := _iterations(r)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{i}", label=label)
    axes.set_yscale("log")
    axes.set_xlabel("iterations k")
    axes.set_ylabel("relative error of the gradient, |g − g*| / |g*|")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()


def _series(summary: Summary) -> dict[str, list[RowSummary]]:
    """Return the rows that make one line, by its label: an engine at several k, or any other row by itself."""
    series: dict[str, list[RowSummary]] = {}
    for r in summary.rows:
        label = r.row.label if _iterations(r) is None else f"{r.row.engine} with k iterations"
        series.setdefault(label, []).append(r)
    return series


def _iterations(r: RowSummary) -> int | None:
    return r.row.options.get("iterations")
