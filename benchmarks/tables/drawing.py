"""What the plots of a report have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import lcm
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

from gradfree.benchmarks.tables.printed import Bar
from gradfree.benchmarks.tasks.task import Score

_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288", "#000000"]
"""Told apart by the color-blind too: Okabe and Ito's, without the yellow, and two of Paul Tol's "muted" ones."""
_MARKERS = "osD^vPX<"
_PAIRS = frozenset(range(lcm(len(_COLORS), len(_MARKERS))))
_POINTS = 72
"""To the inch."""
_ASIDE = 2.0
"""Points between lines at the same place."""
_ROOM = 0.08
"""That a marker with a word beside it takes, as a share of an axis."""
_DECADE = 12.0
"""What an axis has to span for few ticks to do, with its margins."""


class Styles:
    """Colors and markers in one report: what has the same label looks the same in all plots."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, labels: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return color and marker of each line of a plot.

        So many lines differ as there are pairs of the two. A new one shares neither with others of the plot if it can
        be, the color least of all.
        """
        for label in labels:
            if label not in self._numbers:
                beside = [self._numbers[other] for other in labels if other in self._numbers]
                free = _PAIRS.difference(self._numbers.values()) or _PAIRS
                self._numbers[label] = min(free, key=lambda n: (*_shared(n, beside), n))
        return {label: _style(self._numbers[label]) for label in labels}


def _style(n: int) -> dict[str, Any]:
    return {"color": _COLORS[n % len(_COLORS)], "marker": _MARKERS[n % len(_MARKERS)]}


def _shared(n: int, others: Sequence[int]) -> tuple[int, ...]:
    """Return how many of ``others`` have the color of ``n``, and how many the marker."""
    return tuple(sum(_style(n)[part] == _style(other)[part] for other in others) for part in ("color", "marker"))


def draw_curves(axes: Axes, lines: Mapping[str, Mapping[int, Bar]], styles: Styles) -> None:
    """Draw lines with intervals, by label and place on the horizontal axis, a little aside of each other."""
    for n, (label, look) in enumerate(styles(lines).items()):
        aside = _ASIDE * (n - (len(lines) - 1) / 2) / _POINTS
        drawn = _draw_bars(axes, lines[label], label=label, **look)
        # Not before: the limits of the axes are those of the figures.
        for artist in drawn.get_children():
            artist.set_transform(axes.transData + ScaledTranslation(aside, 0.0, axes.figure.dpi_scale_trans))


def draw_rows(axes: Axes, bars: Mapping[str, Bar], name: str, styles: Styles) -> None:
    """Draw values with intervals, each in a place of its own, named on the horizontal axis."""
    for n, (label, look) in enumerate(styles(bars).items()):
        _draw_bars(axes, {n: bars[label]}, **look)
    axes.set_xticks(range(len(bars)), list(bars), rotation=20, ha="right", fontsize="small")
    axes.set_xlim(-0.5, len(bars) - 0.5)
    axes.set_xlabel(name)


def _draw_bars(axes: Axes, bars: Mapping[int, Bar], **look: Any) -> ErrorbarContainer:
    values, lows, highs = zip(*bars.values(), strict=True)
    errors = [np.subtract(values, lows), np.subtract(highs, values)]
    known = not np.isnan(errors).all()
    return axes.errorbar(list(bars), values, errors if known else None, linestyle="-", capsize=3, **look)


def draw_level(axes: Axes, value: float, label: str, look: Mapping[str, Any]) -> None:
    """Draw a value that the horizontal axis does not matter for."""
    # Marked where lines seldom have points.
    across, ends = (0.0, 0.12, 0.88, 1.0), [1, 2]
    transform = axes.get_yaxis_transform()
    axes.plot(across, [value] * 4, linestyle="--", transform=transform, markevery=ends, label=label, **look)


def draw_stacks(axes: Axes, places: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a horizontal bar at each place, from the top, of ``parts`` end to end; parts of no length are left out.

    Args:
        axes: to draw on.
        places: names of the bars.
        parts: what bars are made of: a length for each bar, by the part's name.
    """
    start = np.zeros(len(places))
    for (name, lengths), color in zip(parts.items(), shades(len(parts)), strict=True):
        if any(lengths):
            axes.barh(places, lengths, left=start, label=name, color=color, edgecolor="white")
        start = start + lengths
    axes.invert_yaxis()


def shades(count: int) -> list[Any]:
    """Return colors of what is no engine, from dark to light; the color-blind see the same."""
    return [colormaps["cividis"](n / max(1, count - 1)) for n in range(count)]


def add_legend(axes: Axes) -> None:
    """Put the legend, if it has anything to tell, to the right of the axes, where nothing is hidden."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False)


def count_axis(axes: Axes, counts: Sequence[int], name: str) -> None:
    """Make the horizontal axis one of ``counts`` with equal ratios at equal distances."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(counts)), [str(count) for count in sorted(set(counts))])
    axes.minorticks_off()
    axes.set_xlabel(name)


def score_axis(axes: Axes, name: str, score: Score) -> None:
    """Make the vertical axis one of scores; a percentage ends at 0 and 100, but for room for what lies there."""
    if score.unit == "%":
        low, high = axes.get_ylim()
        low, high = max(low, 0.0), min(high, 100.0)
        axes.set_ylim(low - _ROOM * (high - low), high + _ROOM * (high - low))
    better = "higher" if score.metric().higher_is_better else "lower"
    axes.set_ylabel(f"{name} {score.name} ({score.unit}), {better} is better")


def iterations_axis(axes: Axes, counts: Collection[int]) -> None:
    """Make the horizontal axis one of iterations, from 0."""
    axes.set_xticks(sorted(set(counts)))
    axes.set_xlabel("iterations k (count)")


def ratio_axis(axes: Axes, name: str) -> None:
    """Make the vertical axis one of multiples, with a line at 1."""
    axes.axhline(1.0, color="0.7", zorder=0)
    log_axis(axes, name)


def log_axis(axes: Axes, name: str) -> None:
    """Make the vertical axis logarithmic, with as many ticks as tell the figures."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    fine = high < _DECADE * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if fine else (1.0, 3.0)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(name)
