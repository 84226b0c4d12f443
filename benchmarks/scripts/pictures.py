"""Charts of README and docs: one claim each, legible at 700 pixels, on light screens and dark ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any, Literal

import altair as alt
import polars as pl
import vl_convert

from gradfree.benchmarks.reports.drawing import COLORS

_INK = "#123456"
"""Stands for the colour of texts and axes in what Vega draws."""
_GREY = "#888888"
_STYLE = (
    "<style>svg{color:#1f2328}.ground{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}.ground{fill:#0d1117}}</style>"
    '<rect class="ground" width="100%" height="100%"/>'
)
_AXIS: dict[str, Any] = {
    **dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor"), _INK),
    **{"labelFontSize": 13, "labelLimit": 340, "titleFontSize": 13, "titleFontWeight": "normal"},
    **{"gridColor": _GREY, "gridOpacity": 0.3, "tickCount": 6},
}
_FORMAT: dict[str, Any] = {"log": {"format": "~g"}, "linear": {}}
_BAR = 28
_LETTER, _TITLE = 8, 64
"""Pixels for a letter of a label, and letters for a line of the title: enough for wide fonts, which browsers choose."""
_ROOM = 1.3
"""Width of all bars as a multiple of the longest, for the text behind it."""


def bars(title: str, found: Sequence[Mapping[str, Any]], baseline: str) -> str:
    """Return an SVG of speed-ups, each with ``label``, ``value``, ``text`` and ``rival``, and of the baseline: 1.

    Bars of rivals are grey.
    """
    scale = alt.Scale(domain=[0, _ROOM * max(bar["value"] for bar in found)], nice=False)
    marks = [{**bar, "end": max(bar["value"], 1.0), "color": _color(bar)} for bar in found]
    x, end = (alt.X(f"{name}:Q", axis=None, scale=scale) for name in ("value", "end"))
    side: Literal["left", "right"] = "left" if scale.domain[1] > 3 else "right"  # Where there is room beside the line.
    labels = alt.Axis(
        domain=False, ticks=False, labelPadding=8, minExtent=_LETTER * max(len(b["label"]) for b in found)
    )
    y = alt.Y("label:N", sort=None, title=None, axis=labels)
    each = alt.Chart(pl.DataFrame(marks)).encode(y=y)
    one = alt.Chart(pl.DataFrame({"value": [1.0], "text": [f"1 = {baseline}"]})).encode(x=x)
    return _drawn(
        title,
        each.mark_bar(size=18).encode(x=x, color=alt.Color("color:N", scale=None)),
        each.mark_text(align="left", dx=6, fontSize=14, fontWeight="bold", color=_INK).encode(x=end, text="text:N"),
        one.mark_rule(color=_GREY, strokeDash=[4, 3], strokeWidth=1.5),
        one.mark_text(align=side, dx=4 if side == "left" else -4, y="height", dy=8, fontSize=13, color=_GREY).encode(
            text="text:N"
        ),
        height=_BAR * len(found) + 70,
    )


def _color(bar: Mapping[str, Any]) -> str:
    return _GREY if bar["rival"] else COLORS[bar["value"] < 1]


def lines(
    title: str, found: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, kind: Literal["log", "linear"]
) -> str:
    """Return an SVG of a line for each label, which stands at its last point; ``kind`` is "log" or "linear"."""
    data = pl.DataFrame([{"label": label, "x": at, "y": up} for label, line in found.items() for at, up in line])
    across = alt.X("x:Q", title=x, scale=alt.Scale(domain=[0, 1.15 * float(data["x"].max())], nice=False))  # type: ignore[arg-type]
    up = alt.Y("y:Q", title=y, scale=alt.Scale(type=kind, nice=False, padding=10), axis=alt.Axis(**_FORMAT[kind]))
    color = alt.Color("label:N", legend=None, scale=alt.Scale(domain=list(found), range=COLORS[: len(found)]))
    line = alt.Chart(data).encode(x=across, y=up, color=color)
    ends = alt.Chart(data.group_by("label", maintain_order=True).last()).encode(x=across, y=up, text="label:N")
    return _drawn(
        title,
        line.mark_line(strokeWidth=2.5),
        line.mark_point(filled=True, size=35),
        ends.mark_text(align="left", dx=8, fontSize=14, fontWeight="bold", color=_INK),
        height=380,
    )


def points(title: str, found: Sequence[Mapping[str, Any]], x: str, y: str) -> str:
    """Return an SVG of points, each with ``label``, ``x``, ``value`` and its interval from ``low`` to ``high``."""
    across = alt.X("x:Q", title=x, scale=alt.Scale(domain=[0, 1], nice=False))
    up, ends = alt.Y("value:Q", title=y, scale=alt.Scale(zero=False, padding=20)), (alt.Y("low:Q"), alt.Y2("high:Q"))
    each = alt.Chart(pl.DataFrame(found)).encode(x=across)
    return _drawn(
        title,
        each.mark_rule(color=_GREY, strokeWidth=1.5).encode(y=ends[0], y2=ends[1]),
        each.mark_point(filled=True, size=70, color=COLORS[0], opacity=1).encode(y=up),
        each.mark_text(align="left", dx=8, dy=-8, fontSize=14, color=_INK).encode(y=up, text="label:N"),
        height=330,
    )


def _drawn(title: str, *layers: alt.Chart, height: int) -> str:
    heading = alt.TitleParams(wrap(title, _TITLE), anchor="start", frame="bounds", color=_INK, fontSize=16, offset=14)
    drawn = (
        alt.layer(*layers)
        .properties(width=700, height=height, title=heading, padding=12)
        .properties(autosize=alt.AutoSizeParams(type="fit", contains="padding"))
        .configure(background="transparent")
        .configure_view(stroke=None)
        .configure_axis(**_AXIS)
    )
    svg = vl_convert.vegalite_to_svg(drawn.to_json(validate=False)).replace(_INK, "currentColor")
    opening, rest = svg.split(">", 1)
    return f'{opening} role="img"><title>{escape(title)}</title>{_STYLE}{rest}\n'
