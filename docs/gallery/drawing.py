"""The pictures of the gallery: lines or bars as an SVG beside the example that draws it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SHORT = "GRADFREE_SHORT" in os.environ
"""Whether examples run in a small form, to see that they work."""
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"]


def save(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> None:
    """Write the lines, label to points (x, y), to an SVG with the name of the running script; none in short runs."""
    for label, points in lines.items():
        print(f"{label}: {x} {points[-1][0]:.4g}, {y} {points[-1][1]:.4g}")
    if SHORT:
        return
    import altair as alt
    import polars as pl
    import vl_convert

    rows = [{"label": label, "x": float(a), "y": float(b)} for label, line in lines.items() for a, b in line]
    chart = alt.Chart(pl.DataFrame(rows), title=title, width=560, height=260).mark_line(point={"size": 18})
    chart = chart.encode(
        x=alt.X("x:Q", title=x),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=False)),
        color=alt.Color("label:N", title=None, scale=alt.Scale(domain=list(lines), range=COLORS[: len(lines)])),
    )
    Path(sys.argv[0]).with_suffix(".svg").write_text(vl_convert.vegalite_to_svg(chart.to_json()), encoding="utf-8")
