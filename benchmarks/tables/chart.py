"""Charts as data: points with intervals, taken from a table of facts, and axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.facts import FEWEST, select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Score

_POINT = ("task", "setting", "row")
"""The columns that identify a point."""
_FAR = 10.0
"""An axis is logarithmic if the largest value is more than this many times the smallest."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: with the unit in brackets.
        kind: "linear", "log" or "names".
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
        points: as :func:`points` returns them: ``label``, ``x``, ``y`` and intervals. With a column ``line``, only
            points of the same label and ``line`` are joined.
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


def points(facts: pl.DataFrame, x: str | Figure, y: str | Figure, label: str = "series") -> pl.DataFrame:
    """Return the points of a chart, in the order of the facts.

    Args:
        facts: the table of facts.
        x: a column of the facts, or a metric; points without a value of it are left out.
        y: the same for the other axis.
        label: the column that names a point's line.
    """
    ours = select(facts)
    found = ours.unique(_POINT, keep="first", maintain_order=True).select(*_POINT, "series", "k", "at")
    for name, shown in (("x", x), ("y", y)):
        if isinstance(shown, Figure):
            found = _joined(found, ours, shown, name)
        else:
            found = found.with_columns(pl.col(shown).alias(name), **_no_interval(name))
    return found.with_columns(label=pl.col(label))


def runs(facts: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return the points of single runs over ``at``: one label a row, one line a seed."""
    found = facts.filter(pl.col("seed").is_not_null(), pl.col("metric") == metric, pl.col("value").is_finite())
    line = pl.concat_str("row", pl.lit(", seed "), "seed")
    ends = {**_no_interval("x"), **_no_interval("y")}
    return found.select("task", "setting", "row", line=line, label="row", x="at", y="value", **ends)


def _no_interval(axis: str) -> dict[str, pl.Expr]:
    """Return the null columns of an axis on which points have no intervals."""
    return {f"{axis}_{end}": pl.lit(None, pl.Float64) for end in ("low", "high")}


def _joined(found: pl.DataFrame, facts: pl.DataFrame, figure: Figure, name: str) -> pl.DataFrame:
    """Join a metric's values, where known, and intervals to the points, as ``name``, ``name_low``, ``name_high``."""
    where = {"metric": figure.metric} | ({} if figure.unit is None else {"unit": figure.unit})
    has_interval = (pl.col("n") == 0) | (pl.col("n") >= FEWEST)  # 0 for a median.
    columns = {name: pl.col("value"), **{f"{name}_{end}": pl.when(has_interval).then(end) for end in ("low", "high")}}
    known = select(facts, **where).drop_nulls("value").drop_nans("value")
    values = known.select(*_POINT, **{new: column * figure.factor for new, column in columns.items()})
    return found.join(values, on=_POINT, how="inner", nulls_equal=True, maintain_order="left")
