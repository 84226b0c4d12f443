"""Charts as data: points with intervals, taken from a table of facts, and axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.facts import select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Score

_SWAPPED = {"x": "y", "y": "x", "x_low": "y_low", "y_low": "x_low", "x_high": "y_high", "y_high": "x_high"}
_POINT = ("task", "setting", "row")
"""The columns that identify a point."""
_FAR = 10.0
"""An axis is logarithmic if the largest value is more than this many times the smallest."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: with the unit in brackets.
        kind: "linear", "log", "whole" or "names".
        bounds: limits of the values: 0 and 100 for a percentage.
    """

    title: str
    kind: str = "linear"
    bounds: tuple[float, float] | None = None


def score_axis(split: str, score: Score, kind: str = "linear") -> Axis:
    """Return the axis of scores; a percentage is bounded by 0 and 100."""
    better = "higher" if score.higher_is_better else "lower"
    bounds = (0.0, 100.0) if score.unit == "%" else None
    return Axis(f"{split} {score.name} ({score.unit}), {better} is better", kind, bounds)


def scale_of(values: Sequence[float]) -> str:
    """Return the kind of an axis: "log" for positive values that are far apart, else "linear"."""
    return "log" if values and 0.0 < _FAR * min(values) < max(values) else "linear"


@dataclass(frozen=True)
class Chart:
    """The declaration of one chart.

    Attributes:
        title: unique within a report.
        points: as :func:`points` returns them: ``label``, ``x``, ``y`` and intervals. Points without ``x`` are
            not drawn. With a column ``line``, only points of the same label and ``line`` are joined.
        x: the horizontal axis.
        y: the vertical axis.
        lines: whether points of one label are joined.
        rules: reference lines, label to value: on the ``x`` axis if the ``y`` axis has names, else on the ``y`` axis.
        ringed: legend of the points whose column ``ringed`` is true; empty if there are none.
    """

    title: str
    points: pl.DataFrame
    x: Axis
    y: Axis
    lines: bool = False
    rules: Mapping[str, float] = field(default_factory=dict)
    ringed: str = ""


def no_intervals() -> dict[str, pl.Expr]:
    """Return null interval columns, for points without intervals."""
    return {f"{axis}_{end}": pl.lit(None, pl.Float64) for axis in "xy" for end in ("low", "high")}


def points(facts: pl.DataFrame, x: str | Figure, y: Figure, label: str = "series") -> pl.DataFrame:
    """Return the points of a chart, in the order of the facts.

    Args:
        facts: the table of facts.
        x: a column of the facts, or a metric; points without a value of it are left out.
        y: a metric; points without a value of it are left out.
        label: the column that names a point's line.
    """
    ours = select(facts)
    found = ours.unique(_POINT, keep="first", maintain_order=True).select(*_POINT, "series", "k", "at")
    found = _joined(found, ours, y, "y").filter(pl.col("y").is_not_nan())
    if isinstance(x, Figure):
        found = _joined(found, ours, x, "x")
    else:
        found = found.with_columns(x=pl.col(x), x_low=(ends := no_intervals())["x_low"], x_high=ends["x_high"])
    return found.with_columns(label=pl.col(label))


def bars(facts: pl.DataFrame, x: Figure, y: str, label: str = "row") -> pl.DataFrame:
    """Return the points of a chart whose vertical axis lists the names in the column ``y``."""
    return points(facts, y, x, label).rename(_SWAPPED)


def runs(facts: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return the points of single runs over ``at``: one label a row, one line a seed."""
    found = facts.filter(pl.col("seed").is_not_null(), pl.col("metric") == metric, pl.col("value").is_finite())
    line = pl.concat_str("row", pl.lit(", seed "), "seed")
    return found.select("task", "setting", "row", line=line, label="row", x="at", y="value", **no_intervals())


def _joined(found: pl.DataFrame, facts: pl.DataFrame, figure: Figure, name: str) -> pl.DataFrame:
    """Join a metric's value and interval to the points, as ``name``, ``name_low`` and ``name_high``."""
    where = {"metric": figure.metric} | ({} if figure.unit is None else {"unit": figure.unit})
    columns = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    known = select(facts, **where).drop_nulls("value")
    values = known.select(*_POINT, **{new: pl.col(old) * figure.factor for new, old in columns.items()})
    return found.join(values, on=_POINT, nulls_equal=True, maintain_order="left")
