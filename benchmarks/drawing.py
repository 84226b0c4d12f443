"""What the plots of a report have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

_COLORS = 10
_MARKERS = "osD^vPX*"
_DECADE = 12.0
"""What an axis has to span for few ticks to do, with its margins."""


def style(n: int) -> dict[str, Any]:
    """Return color and marker of the ``n``-th line: forty differ, and neighbours that lie on each other in both."""
    return {"color": f"C{n % _COLORS}", "marker": _MARKERS[n % len(_MARKERS)]}


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
