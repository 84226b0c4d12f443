"""Charts as Altair draws them: with all facts of a point where the pointer rests, and labels to click."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from gradfree.benchmarks.reports.looks import Look, Looks, shades
from gradfree.benchmarks.tables.chart import TIPS, Axis, Chart

_WIDTH, _HEIGHT = 480, 280
_ROOM = 0.08
"""That a marker takes at the end of an axis, as a share of it."""
_LOG_ROOM = 1.2
"""The same on a logarithmic axis, as a factor."""
_GREY = "#888888"
_FAINT, _HIDDEN = 0.35, 0.06
_ASIDE = 0.006
"""Between intervals at the same place, as a share of the axis."""
_TICKS = 10
_MANY = 20
"""Points on a line from which on they are small."""
_FEW = 8
"""Charts up to which two stand side by side in a picture; of more, four."""


def spec(chart: Chart, looks: Looks) -> dict[str, Any]:
    """Return a chart for a page, as wide as its place: points tell what is known of them, the legend filters."""
    drawn = _layers(chart, looks, shown=alt.selection_point(name="shown", fields=["label"], bind="legend"))
    return json.loads(drawn.properties(width="container", height=_HEIGHT).to_json())


def picture(charts: Sequence[Chart]) -> bytes:
    """Return all charts in one PNG, two or four side by side."""
    looks = Looks()
    drawn = [_layers(chart, looks).properties(width=_WIDTH, height=_HEIGHT) for chart in charts]
    together = alt.concat(*drawn, columns=2 if len(drawn) <= _FEW else 4).resolve_scale(
        color="independent", shape="independent"
    )
    return vl_convert.vegalite_to_png(together.to_json(), scale=1)


def _layers(chart: Chart, looks: Looks, shown: alt.Parameter | None = None) -> alt.LayerChart:
    drawing = _Drawing(chart, looks, shown)
    layers = drawing.stacks() if chart.stacked else drawing.layers()
    return alt.layer(*layers).properties(title=alt.TitleParams(chart.title, subtitle=drawing.subtitle, anchor="start"))


class _Drawing:
    """The layers of one chart."""

    def __init__(self, chart: Chart, looks: Looks, shown: alt.Parameter | None):
        self.chart, self.shown = chart, shown
        # Lines before levels, as there is more to find of them.
        levels = chart.points.sort(pl.col("x").is_null(), maintain_order=True)
        self.labels = levels["label"].unique(maintain_order=True).to_list()
        told, self.tooltips = _told(chart.points)
        self.x_scale, self.y_scale = _Scale(chart.x, chart.points, "x"), _Scale(chart.y, chart.points, "y")
        self.points = self._aside(self.y_scale.fitted(self.x_scale.fitted(told)))
        legend = alt.Legend(title=None, labelLimit=260, symbolOpacity=1) if len(self.labels) > 1 else None
        found = self._looks(looks)
        colors, shapes = [look.color for look in found], [look.shape for look in found]
        self.color = alt.Color("label:N", scale=alt.Scale(domain=self.labels, range=colors), legend=legend, sort=None)
        self.shape = alt.Shape("label:N", scale=alt.Scale(domain=self.labels, range=shapes), legend=legend, sort=None)

    def _looks(self, looks: Looks) -> list[Look]:
        """Return the look of each label: its own, or that of the engine that the label is one step of."""
        if self.chart.stacked:
            return [Look(color, "square") for color in shades(len(self.labels))]
        if "strength" not in self.chart.points.columns:
            return list(looks(self.labels).values())
        of = {
            label: (row, strength)
            for label, row, strength in self.points.select("label", "row", "strength").iter_rows()
        }
        engines = looks(list(dict.fromkeys(of[label][0] for label in self.labels)))
        return [engines[of[label][0]].faded(of[label][1]) for label in self.labels]

    def _aside(self, points: pl.DataFrame) -> pl.DataFrame:
        """Return the points of lines that share places a little aside of each other, where they have intervals."""
        if self.chart.x.kind not in ("counts", "whole") or points["y_low"].drop_nulls().is_empty():
            return points
        low, high = float(self.x_scale.values.min()), float(self.x_scale.values.max())  # type: ignore[arg-type]
        middle = (len(self.labels) - 1) / 2
        steps = {label: _ASIDE * (n - middle) for n, label in enumerate(self.labels)}
        step = pl.col("label").replace_strict(steps, return_dtype=pl.Float64)
        x = pl.col("x").cast(pl.Float64)
        return points.with_columns(
            x=x * (high / low) ** step if self.chart.x.kind == "counts" else x + (high - low) * step
        )

    @property
    def subtitle(self) -> str:
        """Say what is drawn that is no label's."""
        chart = self.chart
        ringed = chart.ringed and "ringed" in chart.points.columns and chart.points["ringed"].any()
        told = [f"grey: {what}" for what in chart.band] + [f"dotted: {what}" for what in chart.rules]
        return "; ".join([*told, *([f"ringed: {chart.ringed}"] if ringed else [])])

    def layers(self) -> Iterator[alt.Chart]:
        """Yield what is drawn, from behind to before."""
        chart, x, y = self.chart, self.x_scale.encoding(alt.X), self.y_scale.encoding(alt.Y)
        yield from self._across()
        at = self.points.drop_nulls("x")
        levels = self.points.filter(pl.col("x").is_null())
        if not levels.is_empty():
            yield (
                self._of(levels)
                .mark_rule(strokeDash=[6, 4], strokeWidth=2)
                .encode(y=y, color=self.color, tooltip=self.tooltips)
            )
        if chart.lines:
            faint = _FAINT if chart.lines == "faint" else 1.0
            yield self._of(at, faint).mark_line(clip=True).encode(x=x, y=y, color=self.color, detail="label:N")
        for name, channels in (
            ("y", {"x": x, "y": self.y_scale.encoding(alt.Y, "y_low"), "y2": "y_high"}),
            ("x", {"y": y, "x": self.x_scale.encoding(alt.X, "x_low"), "x2": "x_high"}),
        ):
            known = at.drop_nulls([f"{name}_low", f"{name}_high"])
            if not known.is_empty():
                yield self._of(known).mark_rule(clip=True, strokeWidth=1.5).encode(color=self.color, **channels)
        if self._ringed is not None:
            yield (
                alt.Chart(self._ringed)
                .mark_line(interpolate="step-after", strokeDash=[2, 3], color=_GREY)
                .encode(x=x, y=y)
            )
            yield alt.Chart(self._ringed).mark_point(size=350, color=_GREY, strokeWidth=1.5).encode(x=x, y=y)
        yield (
            self._filtering(at)
            .mark_point(filled=True, size=70 if len(at) <= _MANY * len(self.labels) else 12)
            .encode(x=x, y=y, color=self.color, shape=self.shape, tooltip=self.tooltips)
        )
        yield from self._iterations(at, x, y)

    def stacks(self) -> Iterator[alt.Chart]:
        """Yield horizontal bars, their parts in the labels' order from the left."""
        order = self.points.with_columns(
            order=pl.col("label").replace_strict(self.labels, range(len(self.labels)), return_dtype=pl.Int64)
        )
        yield (
            self._filtering(order)
            .mark_bar()
            .encode(
                x=alt.X("x:Q", title=self.chart.x.title),
                y=self.y_scale.encoding(alt.Y),
                color=self.color,
                order="order:Q",
                tooltip=self.tooltips,
            )
        )

    def _of(self, points: pl.DataFrame, opacity: float = 1.0) -> alt.Chart:
        """Return the chart of some points, which a click on the legend leaves alone or all but hides."""
        drawn = alt.Chart(points)
        if self.shown is None:
            return drawn.encode(opacity=alt.value(opacity))
        return drawn.encode(opacity=alt.when(self.shown).then(alt.value(opacity)).otherwise(alt.value(_HIDDEN)))

    def _filtering(self, points: pl.DataFrame) -> alt.Chart:
        """Return the chart of the points that the legend is of; bound to a layer without one, it would not answer."""
        return self._of(points).add_params(self.shown) if self.shown else self._of(points)

    def _across(self) -> Iterator[alt.Chart]:
        """Yield what reaches across the chart."""
        for what, (low, high) in self.chart.band.items():
            low, high = self.y_scale.inside(low), self.y_scale.inside(high)
            shade = pl.DataFrame({"low": [low], "high": [high], "what": [what]})
            yield (
                alt.Chart(shade)
                .mark_rect(color=_GREY, opacity=0.15)
                .encode(y=self.y_scale.encoding(alt.Y, "low"), y2="high", tooltip=alt.Tooltip("what:N", title="grey"))
            )
        for what, value in self.chart.rules.items():
            rule = pl.DataFrame({"value": [value], "what": [what]})
            yield (
                alt.Chart(rule)
                .mark_rule(color=_GREY, strokeDash=[2, 3])
                .encode(y=self.y_scale.encoding(alt.Y, "value"), tooltip=alt.Tooltip("what:N", title="dotted"))
            )

    @property
    def _ringed(self) -> pl.DataFrame | None:
        if not self.chart.ringed or "ringed" not in self.points.columns:
            return None
        found = self.points.filter("ringed").sort("x")
        return None if found.is_empty() else found

    def _iterations(self, at: pl.DataFrame, x: alt.X, y: alt.Y) -> Iterator[alt.Chart]:
        """Yield k beside the first and last point of each faint line, every line on a side of its own."""
        if self.chart.lines != "faint" or "k" not in at.columns:
            return
        for n, (_, line) in enumerate(at.drop_nulls("k").group_by("label", maintain_order=True)):
            line = line.sort("k")
            ends = line if len(line) < 3 else line[[0, -1]]
            side = 1 if n % 2 == 0 else -1
            named = ends.with_columns(text=pl.concat_str(pl.lit("k="), "k"))
            yield (
                self._of(named)
                .mark_text(dx=8 * side, dy=-9 * side, align="left" if side > 0 else "right", fontSize=11)
                .encode(x=x, y=y, text="text:N", color=self.color)
            )


class _Scale:
    """How values lie along an axis."""

    def __init__(self, axis: Axis, points: pl.DataFrame, name: str):
        self.axis, self.name = axis, name
        self.values = points[name].drop_nulls()
        self.domain = self._domain(points)

    def _domain(self, points: pl.DataFrame) -> tuple[float, float] | None:
        """Return the ends of the axis; ``None`` if the values have no number to tell."""
        if self.axis.kind in ("names", "counts") or self.values.is_empty():
            return None
        known = pl.concat(
            [
                self.values.cast(pl.Float64),
                *(
                    points[name].drop_nulls()
                    for name in (f"{self.name}_low", f"{self.name}_high")
                    if name in points.columns
                ),
            ]
        )
        low, high = float(known.min()), float(known.max())  # type: ignore[arg-type]
        if self.axis.kind == "log":
            least = float(self.values.min()) / 2  # type: ignore[arg-type]
            return max(low / _LOG_ROOM, least), high * _LOG_ROOM
        if self.axis.bounds:
            low, high = max(low, self.axis.bounds[0]), min(high, self.axis.bounds[1])
        room = _ROOM * (high - low) or 0.1 * abs(high) or 1.0
        return low - room, high + room

    def inside(self, value: float) -> float:
        """Return ``value``, or the axis' end that is next to it."""
        return value if self.domain is None else min(max(value, self.domain[0]), self.domain[1])

    def fitted(self, points: pl.DataFrame) -> pl.DataFrame:
        """Return the points with intervals that end with the axis."""
        if self.domain is None:
            return points
        ends = [name for name in (f"{self.name}_low", f"{self.name}_high") if name in points.columns]
        return points.with_columns(pl.col(ends).clip(*self.domain))

    def encoding(self, channel: Any, field: str = "") -> Any:
        """Return the axis for ``field``, its own values if nothing else is named."""
        field, title = field or self.name, self.axis.title
        if self.axis.kind == "names":
            return channel(
                f"{field}:N",
                title=title,
                sort=None,
                axis=alt.Axis(labelAngle=-20 if channel is alt.X else 0, labelLimit=220),
            )
        if self.axis.kind == "counts":
            ticks = sorted(set(self.values.to_list()))
            return channel(
                f"{field}:Q",
                title=title,
                scale=alt.Scale(type="log", base=2, nice=False, padding=20),
                axis=alt.Axis(values=ticks, format="d"),
            )
        domain = list(self.domain or (0, 1))
        if self.axis.kind == "log":
            return channel(
                f"{field}:Q",
                title=title,
                scale=alt.Scale(type="log", domain=domain, nice=False),
                axis=alt.Axis(format="~g", tickCount=6, gridOpacity=0.4),
            )
        whole = self.axis.kind == "whole"
        axis = alt.Axis(format="d", values=_ticks(self.values.to_list())) if whole else alt.Axis()
        return channel(f"{field}:Q", title=title, scale=alt.Scale(domain=domain, nice=False, zero=False), axis=axis)


def _ticks(values: Sequence[float]) -> list[int]:
    """Return whole numbers from the least to the greatest of ``values``, few enough to be told apart."""
    low, high = int(min(values)), int(max(values))
    return list(range(low, high + 1, max(1, ceil((high - low) / _TICKS))))


def _told(points: pl.DataFrame) -> tuple[pl.DataFrame, list[alt.Tooltip]]:
    """Return the points with a column for each heading of what is known of them, and what shows those."""
    told = [json.loads(text) if text else {} for text in points[TIPS]]
    headings = list(dict.fromkeys(heading for tips in told for heading in tips))
    columns = {f"tip{n}": [tips.get(heading) for tips in told] for n, heading in enumerate(headings)}
    tooltips = [alt.Tooltip(f"{name}:N", title=heading) for name, heading in zip(columns, headings, strict=True)]
    named = [alt.Tooltip("row:N", title="row")] + (
        [alt.Tooltip("setting:N", title="setting")] if points["setting"].drop_nulls().len() else []
    )
    kept = [c for c in points.columns if c != TIPS]
    return points.select(kept).with_columns(
        **{name: pl.Series(values, dtype=pl.String) for name, values in columns.items()}
    ), [*named, *tooltips]
