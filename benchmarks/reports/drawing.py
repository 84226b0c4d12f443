"""Charts drawn by Altair: a label has one color and shape in the whole report, and can be clicked to filter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from typing import Any

import altair as alt
import polars as pl
from altair.utils.schemapi import debug_mode

from gradfree.benchmarks.tables.chart import Axis, Chart

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933", "#888888"]
"""Safe for color-blind readers, on white and on black: Okabe and Ito's without yellow and black, and Paul Tol's
"muted" purple, olive and grey."""
SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left", "triangle-right"]
_GREY = "#888888"
_HEIGHT = 280
_LINE = 40
"""Characters in a line of a chart's title, which has room on a phone."""
_MANY = 20
"""Lines with more points than this have small markers."""
_THEME: dict[str, Any] = {
    "axis": {"gridOpacity": 0.4, "tickCount": 6, "labelLimit": 260},
    "legend": {"title": None, "labelLimit": 260, "symbolOpacity": 1},
    "title": {"anchor": "start"},
}

Styles = Mapping[str, tuple[str, str]]
"""Color and shape of each label."""


def styles(charts: Iterable[Chart]) -> Styles:
    """Return a color and a shape for each label in ``charts``; no other label has the color of the first one.

    The shapes move on by one whenever the colors begin anew, so that no two labels look the same.
    """
    labels = dict.fromkeys(label for chart in charts for label in chart.points["label"])
    rounds, others = len(SHAPES), COLORS[1:]
    return {
        label: (COLORS[0], SHAPES[0])
        if not n
        else (others[(n - 1) % len(others)], SHAPES[(n + (n - 1) // len(others)) % rounds])
        for n, label in enumerate(labels)
    }


# Altair's repeated checks against Vega-Lite's schema are slow; a test does the check.
@debug_mode(False)
def spec(chart: Chart, styles: Styles) -> dict[str, Any]:
    """Return a chart's Vega-Lite specification, as wide as its container; a click on the legend filters."""
    shown = alt.selection_point(name="shown", fields=["label"], bind="legend")
    subtitle = [f"dotted: {what}" for what in chart.rules]
    subtitle += [f"ringed: {chart.ringed}"] if chart.ringed else []
    subtitle += ["one line for each seed"] if "line" in chart.points.columns else []
    # Vega does not wrap a title, which a narrow page would cut.
    title = alt.TitleParams(wrap(chart.title, _LINE), subtitle="; ".join(subtitle))
    layers = list(_layers(chart, styles, shown))
    height = alt.Step(22) if chart.y.kind == "names" else _HEIGHT
    longest = max(map(len, chart.points["label"]), default=0)
    drawn = alt.LayerChart(layer=layers, title=title, width="container", height=height, usermeta={"longest": longest})
    return drawn.configure(**_THEME).to_dict(validate=False)


def _layers(chart: Chart, styles: Styles, shown: alt.Parameter) -> Iterator[alt.Chart]:
    """Yield the chart's layers, from back to front."""
    at = _within(_within(chart.points, "x", chart.x), "y", chart.y)
    x, y = _channel(alt.X, "x", chart.x), _channel(alt.Y, "y", chart.y)
    labels = at["label"].unique(maintain_order=True).to_list()
    colors, shapes = zip(*(styles[label] for label in labels), strict=True) if labels else ((), ())
    legend: dict[str, Any] = {"sort": None} | ({} if len(labels) > 1 else {"legend": None})
    color = alt.Color("label:N", scale=alt.Scale(domain=labels, range=colors), **legend)
    shape = alt.Shape("label:N", scale=alt.Scale(domain=labels, range=shapes), **legend)

    def of(some: pl.DataFrame, opacity: float = 1.0) -> alt.Chart:
        """Return the chart of some points; a click on another label in the legend fades them."""
        clicked = {"param": shown.name, "value": opacity}
        return alt.Chart(some).encode(opacity=alt.OpacityValue(0.06, condition=clicked))

    for what, value in chart.rules.items():
        across, channel = ("x", x) if chart.y.kind == "names" else ("y", y)
        rule = alt.Chart(pl.DataFrame({across: [value], "what": [what]})).mark_rule(color=_GREY, strokeDash=[2, 3])
        yield rule.encode(**{across: channel}, tooltip="what:N")
    if chart.lines:
        yield of(at).mark_line().encode(x=x, y=y, color=color, detail="line:N" if "line" in at.columns else "label:N")
    for name, others in (("x", {"y": y}), ("y", {"x": x})):
        known = at.drop_nulls([f"{name}_low", f"{name}_high"])
        if known.height:
            ends = {name: (alt.X if name == "x" else alt.Y)(f"{name}_low:Q"), f"{name}2": f"{name}_high"}
            yield of(known).mark_rule(strokeWidth=1.5).encode(color=color, **others, **ends)
    if chart.ringed:
        yield alt.Chart(at.filter("ringed")).mark_point(size=350, color=_GREY, strokeWidth=1.5).encode(x=x, y=y)
    tips = [alt.Tooltip(f"{name}:N") for name in ("row", "setting") if at[name].drop_nulls().len()]
    tips += [alt.Tooltip("x:N" if at["x"].dtype == pl.String else "x:Q", title=chart.x.title)]
    tips += [alt.Tooltip("y:N" if at["y"].dtype == pl.String else "y:Q", title=chart.y.title)]
    marks = of(at).mark_point(filled=True, size=70 if at.height <= _MANY * len(labels) else 12)
    # Rows that differ only in k share a label.
    with_k = at.filter(pl.col("k").is_not_null(), pl.col("label") != pl.col("row")) if "k" in at.columns else at.clear()
    if with_k.height:
        yield (
            of(with_k.with_columns(text=pl.format("k={}", "k")))
            .mark_text(align="left", dx=8, dy=-8, color=_GREY)
            .encode(x=x, y=y, text="text:N")
        )
    # The filter must be bound to a layer with a legend.
    yield marks.add_params(shown).encode(x=x, y=y, color=color, shape=shape, tooltip=tips)


def _within(points: pl.DataFrame, name: str, axis: Axis) -> pl.DataFrame:
    """Return the points with intervals clipped to the axis."""
    low, high = axis.bounds or (None, None)
    if axis.kind == "log" and (known := points[name].drop_nulls().to_list()):
        low = min(known) / 2
    ends = [pl.col(f"{name}_low", f"{name}_high").clip(low, high)] if low is not None else []
    return points.with_columns(*ends)


def _channel(channel: Any, name: str, axis: Axis) -> Any:
    """Return the encoding of an axis, with padding for markers at its ends."""
    if axis.kind == "names":
        return channel(f"{name}:N", title=axis.title, sort=None)
    kind: Any
    # No format for linear axes: it would show 95 as 1e+2.
    kind, title, drawn = "linear", axis.title, alt.Axis()
    if axis.kind == "log":
        kind, title, drawn = "log", f"{axis.title}, log scale", alt.Axis(format="~g")
    scale = alt.Scale(type=kind, nice=False, zero=False, padding=14)
    return channel(f"{name}:Q", title=title, scale=scale, axis=drawn)
