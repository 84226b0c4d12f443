"""What a chart shows: points with their intervals, from a table of facts, and the names of its axes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.facts import select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Score

TIPS = "tips"
"""The column with what else is known of a point: text by heading."""
TURNED = {"x": "y", "y": "x", "x_low": "y_low", "y_low": "x_low", "x_high": "y_high", "y_high": "x_high"}
"""What points across are called where they go up."""
_POINT = ("task", "setting", "row")
"""What a point is known by."""


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: with the unit in brackets.
        kind: "linear", "log", "counts" (equal ratios at equal distances, a tick for each), "whole" or "names".
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
        points: as :func:`points` returns them: ``label``, ``x``, ``y``, intervals, ``tips``; a point without ``x`` is a
            level across all of it. With ``strength``, from 0 to 1, a label has its row's color, so strong.
            With ``line``, points of one label are joined only where that is the same.
        x: the horizontal axis.
        y: the vertical one.
        lines: whether points of one label are joined: "", "solid", or "faint" where the order is no course.
        rules: values of ``y`` to draw a line across at, by what they are.
        band: values of ``y`` to shade between, by what they are.
        ringed: what the points are that have ``ringed``, joined by steps; nothing if none have.
        stacked: whether points of the same ``y`` are parts of a horizontal bar.
    """

    title: str
    points: pl.DataFrame
    x: Axis
    y: Axis
    lines: str = ""
    rules: Mapping[str, float] = field(default_factory=dict)
    band: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ringed: str = ""
    stacked: bool = False


def no_ends() -> dict[str, pl.Expr]:
    """Return the columns that points without intervals have."""
    return {f"{axis}_{end}": pl.lit(None, pl.Float64) for axis in "xy" for end in ("low", "high")}


def points(facts: pl.DataFrame, x: str | Figure, y: Figure, label: str = "series") -> pl.DataFrame:
    """Return the points of a chart, in the order of the facts, with all that is known of each.

    Args:
        facts: the table.
        x: a column of the facts, or what is known of a metric; points without one are left out.
        y: what is known of a metric; points without a value are left out.
        label: the column that tells lines apart.
    """
    ours = select(facts, source=None)
    found = ours.unique(_POINT, keep="first", maintain_order=True).select(*_POINT, "series", "k", "at")
    found = _joined(found, _values(ours, y, "y")).filter(pl.col("y").is_not_nan())
    if isinstance(x, Figure):
        found = _joined(found, _values(ours, x, "x"))
    else:
        found = found.with_columns(x=pl.col(x), x_low=(ends := no_ends())["x_low"], x_high=ends["x_high"])
    return _joined(found, _tips(ours)).with_columns(label=pl.col(label))


def runs(facts: pl.DataFrame, metric: str) -> pl.DataFrame:
    """Return the points of a chart of single runs, by ``at``: a label for each row, a line for each of its seeds.

    Rows of one series have shades of its color.
    """
    found = facts.filter(pl.col("seed").is_not_null(), pl.col("metric") == metric, pl.col("value").is_finite())
    found = found.with_columns(line=pl.concat_str("row", pl.lit(", seed "), "seed"))
    tips = [json.dumps({"run": run, metric: f"{value:.4g}"}) for run, value in found["line", "value"].iter_rows()]
    place, count = pl.col("row").rank("dense").over("series"), pl.col("row").n_unique().over("series")
    return found.with_columns(strength=0.25 + 0.75 * place / count).select(
        "task",
        "setting",
        "strength",
        "line",
        pl.Series(TIPS, tips, pl.String),
        row="series",
        label="row",
        x="at",
        y="value",
        **no_ends(),
    )


def stacks(facts: pl.DataFrame, place: str, parts: Mapping[str, Figure]) -> pl.DataFrame:
    """Return the points of a stacked chart: a bar for each value of the column ``place``, of ``parts`` by name."""
    found = [points(facts, place, figure).with_columns(label=pl.lit(name)) for name, figure in parts.items()]
    return pl.concat(found).rename(TURNED)


def _joined(found: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    return found.join(more, on=_POINT, nulls_equal=True, maintain_order="left")


def _values(facts: pl.DataFrame, figure: Figure, name: str) -> pl.DataFrame:
    """Return what is known of each point, as ``name``, ``name_low`` and ``name_high``."""
    where = {"metric": figure.metric} | ({} if figure.unit is None else {"unit": figure.unit})
    columns = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    known = select(facts, **where).drop_nulls("value")
    return known.select(*_POINT, **{new: pl.col(old) * figure.factor for new, old in columns.items()})


def _tips(facts: pl.DataFrame) -> pl.DataFrame:
    """Return all that is known of each point: text by heading, as JSON."""
    known: dict[tuple[Any, ...], dict[str, str]] = {}
    for fact in facts.drop_nulls("value").iter_rows(named=True):
        interval = "" if fact["low"] is None else f" ({fact['interval']}: {fact['low']:.4g} to {fact['high']:.4g})"
        told = known.setdefault(tuple(fact[name] for name in _POINT), {})
        told[fact["metric"] if fact["unit"] in ("", "1") else f"{fact['metric']} ({fact['unit']})"] = (
            f"{fact['value']:.4g}{interval}"
        )
    rows = [(*point, json.dumps(told)) for point, told in known.items()]
    return pl.DataFrame(rows, schema=dict.fromkeys((*_POINT, TIPS), pl.String()), orient="row")
