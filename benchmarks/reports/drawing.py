"""Charts as Altair draws them: one look for each label in all of a report, all facts of a point, labels to click."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import ceil, lcm
from typing import Any, Literal, NamedTuple

import altair as alt
import polars as pl
import vl_convert
from altair.utils.schemapi import debug_mode

from gradfree.benchmarks.tables.chart import TIPS, Axis, Chart

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933", "#888888"]
"""Told apart by the color-blind too, on white and on black: Okabe and Ito's, without the yellow and the black, and
Paul Tol's "muted" purple, olive and grey."""
SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left", "triangle-right"]
_PALE = "#b8b8b8"
_PAIRS = frozenset(range(lcm(len(COLORS), len(SHAPES))))
_SHADES = ["#31446b", "#666970", "#958f78", "#cab969", "#ffea46"]
"""Of cividis, which the color-blind see alike."""
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


class Look(NamedTuple):
    """Color and shape of a label's points."""

    color: str
    shape: str

    def faded(self, strength: float) -> Look:
        """Return the same with a color that is this strong: 0 is grey, 1 the color itself."""
        parts = [[int(color[n : n + 2], 16) for n in (1, 3, 5)] for color in (_PALE, self.color)]
        mixed = (round(pale + strength * (own - pale)) for pale, own in zip(*parts, strict=True))
        return self._replace(color="#" + "".join(f"{part:02x}" for part in mixed))


class Looks:
    """Colors and shapes in one report: what has the same label looks the same in all charts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, labels: Collection[str]) -> dict[str, Look]:
        """Return the look of each label of a chart.

        So many labels differ as there are pairs of the two. A new one shares neither with others of the chart if it
        can be, the color least of all.
        """
        for label in labels:
            if label not in self._numbers:
                beside = [self._numbers[other] for other in labels if other in self._numbers]
                free = _PAIRS.difference(self._numbers.values()) or _PAIRS
                self._numbers[label] = min(free, key=lambda n: (*_shared(n, beside), n))
        return {label: _look(self._numbers[label]) for label in labels}


def shades(count: int) -> list[str]:
    """Return colors of what is no engine, from dark to light."""
    last = len(_SHADES) - 1
    return [_SHADES[round(n * last / max(1, count - 1))] for n in range(count)]


def _look(n: int) -> Look:
    return Look(COLORS[n % len(COLORS)], SHAPES[n % len(SHAPES)])


def _shared(n: int, others: Sequence[int]) -> tuple[int, ...]:
    """Return how many of ``others`` have the color of ``n``, and how many the shape."""
    return tuple(sum(_look(n)[part] == _look(other)[part] for other in others) for part in range(2))


# Altair would hold each part of a chart to Vega-Lite's schema, over and over; tests hold each kind to it, once.
@debug_mode(False)
def spec(chart: Chart, looks: Looks) -> dict[str, Any]:
    """Return a chart for a page, as wide as its place: points tell what is known of them, the legend filters."""
    shown = alt.selection_point(name="shown", fields=["label"], bind="legend")
    return _layers(chart, looks, "container", shown).to_dict(validate=False)


@debug_mode(False)
def picture(charts: Sequence[Chart]) -> bytes:
    """Return all charts in one PNG, two or four side by side."""
    looks = Looks()
    drawn = [_layers(chart, looks, _WIDTH) for chart in charts]
    together = alt.concat(*drawn, columns=2 if len(drawn) <= _FEW else 4).resolve_scale(
        color="independent", shape="independent"
    )
    return vl_convert.vegalite_to_png(together.to_json(validate=False), scale=1)


def _layers(
    chart: Chart, looks: Looks, width: int | Literal["container"], shown: alt.Parameter | None = None
) -> alt.LayerChart:
    drawing = _Drawing(chart, looks, shown)
    layers = drawing.stacks() if chart.stacked else drawing.layers()
    title = alt.TitleParams(chart.title, subtitle=drawing.subtitle, anchor="start")
    return alt.LayerChart(layer=list(layers), title=title, width=width, height=_HEIGHT)


class _Drawing:
    """The layers of one chart."""

    def __init__(self, chart: Chart, looks: Looks, shown: alt.Parameter | None):
        self.chart, self.shown = chart, shown
        # Lines come before levels, as there is more to find of them.
        levels = chart.points.sort(pl.col("x").is_null(), maintain_order=True)
        self.labels = levels["label"].unique(maintain_order=True).to_list()
        told, self.tooltips = _told(chart.points)
        self.x_scale, self.y_scale = (
            _Scale(chart.x, chart.points, "x"),
            _Scale(chart.y, chart.points, "y", chart.rules.values()),
        )
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
        steps = self.points.select("label", "row", "strength").unique(maintain_order=True)
        of = {label: (row, strength) for label, row, strength in steps.iter_rows()}
        engines = looks(steps["row"].unique(maintain_order=True).to_list())
        return [engines[of[label][0]].faded(of[label][1]) for label in self.labels]

    def _aside(self, points: pl.DataFrame) -> pl.DataFrame:
        """Return the points of lines that share places a little aside of each other, where they have intervals."""
        if self.chart.x.kind not in ("counts", "whole") or points["y_low"].drop_nulls().is_empty():
            return points
        low, high = min(self.x_scale.values), max(self.x_scale.values)
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
        told = [f"grey: {what}" for what in self.chart.band] + [f"dotted: {what}" for what in self.chart.rules]
        return "; ".join([*told, *([f"ringed: {self.chart.ringed}"] if self.chart.ringed else [])])

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
            line = "line:N" if "line" in at.columns else "label:N"
            yield self._of(at, faint).mark_line(clip=True).encode(x=x, y=y, color=self.color, detail=line)
        for name, channels in (
            ("y", {"x": x, "y": self.y_scale.encoding(alt.Y, "y_low"), "y2": "y_high"}),
            ("x", {"y": y, "x": self.x_scale.encoding(alt.X, "x_low"), "x2": "x_high"}),
        ):
            known = at.drop_nulls([f"{name}_low", f"{name}_high"])
            if not known.is_empty():
                yield self._of(known).mark_rule(clip=True, strokeWidth=1.5).encode(color=self.color, **channels)
        if chart.ringed:
            ringed = alt.Chart(at.filter("ringed").sort("x")).encode(x=x, y=y)
            yield ringed.mark_line(interpolate="step-after", strokeDash=[2, 3], color=_GREY)
            yield ringed.mark_point(size=350, color=_GREY, strokeWidth=1.5)
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
            return drawn.encode(opacity=alt.OpacityValue(opacity))
        told = {"param": self.shown.name, "value": opacity}
        return drawn.encode(opacity=alt.OpacityValue(_HIDDEN, condition=told))

    def _filtering(self, points: pl.DataFrame) -> alt.Chart:
        """Return the chart of the points that the legend is of; bound to a layer without one, it would not answer."""
        return self._of(points).add_params(self.shown) if self.shown else self._of(points)

    def _across(self) -> Iterator[alt.Chart]:
        """Yield what reaches across the chart."""
        for what, ends in self.chart.band.items():
            low, high = map(self.y_scale.inside, ends)
            drawn = alt.Chart(pl.DataFrame({"low": [low], "high": [high], "what": [what]}))
            y = self.y_scale.encoding(alt.Y, "low")
            yield drawn.mark_rect(color=_GREY, opacity=0.15).encode(y=y, y2="high", tooltip="what:N")
        for what, value in self.chart.rules.items():
            drawn = alt.Chart(pl.DataFrame({"value": [value], "what": [what]}))
            y = self.y_scale.encoding(alt.Y, "value")
            yield drawn.mark_rule(color=_GREY, strokeDash=[2, 3]).encode(y=y, tooltip="what:N")

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
    """How values lie along an axis, and lines ``across``."""

    def __init__(self, axis: Axis, points: pl.DataFrame, name: str, across: Iterable[float] = ()):
        self.axis, self.name, self.ends = axis, name, [f"{name}_low", f"{name}_high"]
        self.values, self._across = points[name].drop_nulls().to_list(), list(across)
        intervals = [end for column in self.ends for end in points[column].drop_nulls()]
        self.domain = (
            self._domain([*self.values, *intervals, *self._across]) if axis.kind not in ("names", "counts") else None
        )

    def _domain(self, known: list[float]) -> tuple[float, float]:
        """Return the ends of the axis, with room for markers beyond what is known."""
        low, high = min(known, default=0.0), max(known, default=1.0)
        if self.axis.kind == "log":
            return max(low / _LOG_ROOM, min([*self.values, *self._across]) / 2), high * _LOG_ROOM
        if self.axis.bounds:
            low, high = max(low, self.axis.bounds[0]), min(high, self.axis.bounds[1])
        room = _ROOM * (high - low) or 0.1 * abs(high) or 1.0
        return low - room, high + room

    def inside(self, value: float) -> float:
        """Return ``value``, or the axis' end that is next to it."""
        return value if self.domain is None else min(max(value, self.domain[0]), self.domain[1])

    def fitted(self, points: pl.DataFrame) -> pl.DataFrame:
        """Return the points with intervals that end with the axis."""
        return points if self.domain is None else points.with_columns(pl.col(self.ends).clip(*self.domain))

    def encoding(self, channel: Any, field: str = "") -> Any:
        """Return the axis for ``field``, its own values if nothing else is named."""
        field, title, kind = field or self.name, self.axis.title, self.axis.kind
        if self.domain is None and kind == "names":
            axis = alt.Axis(labelAngle=-20 if channel is alt.X else 0, labelLimit=220)
            return channel(f"{field}:N", title=title, sort=None, axis=axis)
        if self.domain is None:
            scale, axis = alt.Scale(type="log", base=2, nice=False, padding=20), alt.Axis(format="d")
            axis.values = sorted(set(self.values))
        elif kind == "log":
            scale = alt.Scale(type="log", domain=self.domain, nice=False)
            axis = alt.Axis(format="~g", tickCount=6, gridOpacity=0.4)
        else:
            scale = alt.Scale(domain=self.domain, nice=False, zero=False)
            axis = alt.Axis(format="d", values=_ticks(self.values)) if kind == "whole" else alt.Axis()
        return channel(f"{field}:Q", title=title, scale=scale, axis=axis)


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
    named = [alt.Tooltip(f"{name}:N", title=name) for name in ("row", "setting") if points[name].drop_nulls().len()]
    texts = {name: pl.Series(values, dtype=pl.String) for name, values in columns.items()}
    return points.drop(TIPS).with_columns(**texts), [*named, *tooltips]
