"""What a chart shows: points with their intervals, from a table of facts, and the names of its axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.facts import select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Score

_TURNED = {"x": "y", "y": "x", "x_low": "y_low", "y_low": "x_low", "x_high": "y_high", "y_high": "x_high"}
_POINT = ("task", "setting", "row")
"""What a point is known by."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: with the unit in brackets.
        kind: "linear", "log", "counts" (logarithmic, with a tick for each value), "whole" or "names".
        bounds: that values cannot lie beyond: 0 and 100 for a percentage.
    """

    title: str
    kind: str = "linear"
    bounds: tuple[float, float] | None = None


ITERATIONS = Axis("iterations k (count)", "whole")


def score_axis(split: str, score: Score, kind: str = "linear") -> Axis:
    """Return the axis of scores; a percentage ends at 0 and 100."""
    better = "higher" if score.higher_is_better else "lower"
    bounds = (0.0, 100.0) if score.unit == "%" else None
    return Axis(f"{split} {score.name} ({score.unit}), {better} is better", kind, bounds)


@dataclass(frozen=True)
class Chart:
    """One chart, declared.

    Attributes:
        title: for people, another for each chart of a report.
        points: as :func:`points` returns them: ``label``, ``x``, ``y`` and intervals; a point without ``x`` is a level
            across all of it. With ``line``, points of one label are joined only where that is the same.
        x: the horizontal axis.
        y: the vertical one.
        lines: whether points of one label are joined.
        rules: values to draw a line across at, by what they are: of ``x`` where ``y`` has names, else of ``y``.
        band: values of ``y`` to shade between, by what they are.
        ringed: what the points are that have ``ringed``; nothing if none have.
    """

    title: str
    points: pl.DataFrame
    x: Axis
    y: Axis
    lines: bool = False
    rules: Mapping[str, float] = field(default_factory=dict)
    band: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ringed: str = ""


def no_ends() -> dict[str, pl.Expr]:
    """Return the columns that points without intervals have."""
    return {f"{axis}_{end}": pl.lit(None, pl.Float64) for axis in "xy" for end in ("low", "high")}


def points(facts: pl.DataFrame, x: str | Figure, y: Figure, label: str = "series") -> pl.DataFrame:
    """Return the points of a chart, in the order of the facts.

    Args:
        facts: the table.
        x: a column of the facts, or what is known of a metric; points without one are left out.
        y: what is known of a metric; points without a value are left out.
        label: the column that tells lines apart.
    """
    ours = select(facts, source=None)
    found = ours.unique(_POINT, keep="first", maintain_order=True).select(*_POINT, "series", "k", "at")
    found = _joined(found, ours, y, "y").filter(pl.col("y").is_not_nan())
    if isinstance(x, Figure):
        found = _joined(found, ours, x, "x")
    else:
        found = found.with_columns(x=pl.col(x), x_low=(ends := no_ends())["x_low"], x_high=ends["x_high"])
    return found.with_columns(label=pl.col(label))


def bars(facts: pl.DataFrame, x: Figure, y: str, label: str = "row") -> pl.DataFrame:
    """Return the points of a chart whose vertical axis has the names of the column ``y``."""
    return points(facts, y, x, label).rename(_TURNED)


def runs(facts: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return the points of a chart of single runs, by ``at``: a label for each row, a line for each of its seeds."""
    found = facts.filter(pl.col("seed").is_not_null(), pl.col("metric") == metric, pl.col("value").is_finite())
    line = pl.concat_str("row", pl.lit(", seed "), "seed")
    return found.select("task", "setting", "row", line=line, label="row", x="at", y="value", **no_ends())


def _joined(found: pl.DataFrame, facts: pl.DataFrame, figure: Figure, name: str) -> pl.DataFrame:
    """Add what is known of each point, as ``name``, ``name_low`` and ``name_high``."""
    where = {"metric": figure.metric} | ({} if figure.unit is None else {"unit": figure.unit})
    columns = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    known = select(facts, **where).drop_nulls("value")
    values = known.select(*_POINT, **{new: pl.col(old) * figure.factor for new, old in columns.items()})
    return found.join(values, on=_POINT, nulls_equal=True, maintain_order="left")
