"""The one source of a report: numbers with their intervals, and a tidy table of such facts, one a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from gradfree.benchmarks.tables.frames import pl
from gradfree.wording import plain

_CONFIDENCE = 0.95
_ALIKE = 1e-4
"""Share of a difference by which several may differ, by rounding, and be the same."""
SCHEMA: dict[str, type] = {
    "task": str,
    "device": str,
    "threads": int,
    "setting": str,
    "at": float,
    "row": str,
    "series": str,
    "k": int,
    "seed": int,
    "metric": str,
    "unit": str,
    "value": float,
    "low": float,
    "high": float,
    "interval": str,
    "n": int,
    "source": str,
    "note": str,
}
"""Columns of the table.

task, device, threads: what was run, and where.
setting, at: where, if an experiment has several: "5 hidden layers", 5.
row, series, k: the engine, the line of a chart that it is a point of, and its iterations.
seed: of a single run; null for what several come to.
metric, unit: what is measured.
value: null if not known, NaN if a run diverged.
low, high, interval: the value's interval and what kind it is, :data:`MEAN` or :data:`MEDIAN`.
n: number of runs that the value is a mean of.
source: who says so, if not our records.
note: in words, above all why there is no value.
"""
MEAN, MEDIAN = "95 % CI", "quartiles"
_WHERE = ("task", "device", "threads", "setting", "at", "source")
_WHO = ("row", "series", "k")
_WHAT = ("metric", "unit")
Fact = dict[str, Any]
"""A row of the table; what is left out is null."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; NaN for what is not known.

    Attributes:
        value: a mean over seeds, or a median of timing rounds.
        low: the interval's lower end: of the mean's 95 % confidence interval, or the lower quartile.
        high: its upper end.
        n: number of seeds; 0 for a median.
    """

    value: float = nan
    low: float = nan
    high: float = nan
    n: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of ``values``, one a seed, with its interval by Student's t; NaN if one is not finite."""
        n = len(values)
        if not n or not all(map(isfinite, values)):
            return cls(n=n)
        if n == 1:
            return cls(values[0], n=n)
        from scipy.special import stdtrit

        quantile = float(stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
        mean, margin = fmean(values), quantile * stdev(values) / sqrt(n)
        return cls(mean, mean - margin, mean + margin, n)

    @classmethod
    def of_differences(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of ``values``, differences of the same seed.

        Differences that are the same but not 0, as those of accuracies on few examples easily are, have no interval:
        Student's t would make it 0 wide.
        """
        mean = cls.of(values)
        alike = mean.margin <= _ALIKE * abs(mean.value)
        return replace(mean, low=nan, high=nan) if alike and mean.value else mean

    @classmethod
    def recorded(cls, results: Mapping[str, Any], name: str) -> Estimate:
        """Return what :func:`gradfree.benchmarks.timing.side_by_side.statistics` has recorded as ``name``."""
        return cls(results[name], *results[f"{name}_quartiles"])

    @property
    def margin(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def relative(self) -> float:
        """The interval's farther end, as a share of the value."""
        return max(self.high - self.value, self.value - self.low) / self.value

    def __neg__(self) -> Estimate:
        return Estimate(-self.value, -self.high, -self.low, self.n)

    def __truediv__(self, other: Estimate) -> Estimate:
        """Return the ratio to what was timed elsewhere, between the farthest ends."""
        return Estimate(self.value / other.value, self.low / other.high, self.high / other.low)


def pareto_front(costs: Mapping[str, Estimate], is_better: Callable[[str, str], bool]) -> list[str]:
    """Return the rows that are shown to be better than all cheaper ones of the front, the cheapest first.

    Args:
        costs: of the rows.
        is_better: tells whether the first of two rows is shown to be better than the second.
    """
    front: list[str] = []
    for row in sorted(costs, key=lambda row: costs[row].value):
        if all(is_better(row, other) for other in front):
            front.append(row)
    return front


def fact(metric: str, unit: str, estimate: Estimate | float = nan, **context: Any) -> Fact:
    """Return the fact that ``metric`` is ``estimate``; of estimates without ``n``, the interval is of a median."""
    if not isinstance(estimate, Estimate):
        estimate = Estimate(estimate)
    unknown = isnan(estimate.value) and not estimate.n
    return {
        "metric": metric,
        "unit": unit,
        "value": None if unknown else estimate.value,
        "low": _known(estimate.low),
        "high": _known(estimate.high),
        "interval": "" if isnan(estimate.low) else MEAN if estimate.n else MEDIAN,
        "n": estimate.n,
        **context,
        "note": plain(context.get("note") or "") or None,
    }


def table(facts: Iterable[Fact]) -> pl.DataFrame:
    """Return the table of ``facts``.

    Raises:
        ValueError: a fact has what is no column.
    """
    rows = list(facts)
    if strange := {name for row in rows for name in row} - SCHEMA.keys():
        raise ValueError(f"facts have no {', '.join(sorted(strange))}; their columns are {', '.join(SCHEMA)}.")
    return pl.DataFrame(rows, schema=SCHEMA)


def select(facts: pl.DataFrame, **where: Any) -> pl.DataFrame:
    """Return the facts that have these values; those of single seeds only where ``seed`` is asked for."""
    wanted = {"seed": None, **where}
    return facts.filter(pl.all_horizontal(pl.col(name).eq_missing(value) for name, value in wanted.items()))


def estimate_of(row: Mapping[str, Any]) -> Estimate:
    """Return the value of a fact with its interval."""
    value, low, high = (nan if row[name] is None else row[name] for name in ("value", "low", "high"))
    return Estimate(value, low, high, row["n"] or 0)


def estimates(facts: pl.DataFrame, by: str = "row", **where: Any) -> dict[Any, Estimate]:
    """Return what is known where facts have these values, by row or another column; what is not known is left out."""
    known = select(facts, **where).filter(pl.col("value").is_not_null())
    return {row[by]: estimate_of(row) for row in _rows(known)}


def run_fact(metric: str, unit: str, value: float, seed: int, **context: Any) -> Fact:
    """Return the fact that a single run came to ``value``, NaN if it diverged."""
    return fact(metric, unit, Estimate(value, n=1), seed=seed, **context)


def means(found: pl.DataFrame) -> pl.DataFrame:
    """Return the means over seeds of what single runs came to, with their intervals."""
    groups = found.filter(pl.col("seed").is_not_null()).group_by(*_WHERE, *_WHO, *_WHAT, maintain_order=True)
    return table(_of_runs(row, Estimate.of) for row in _rows(groups.agg("value")))


def differences(found: pl.DataFrame, metric: str, references: Mapping[str, str]) -> pl.DataFrame:
    """Return by how much more each row's ``metric`` is than that of the row which ``references`` has, seed by seed.

    Rows without a reference are left out, and those where the two have no seed in common.
    """
    ours = found.filter(pl.col("seed").is_not_null(), pl.col("metric") == metric).with_columns(
        reference=pl.col("row").replace_strict(references, default=None, return_dtype=pl.String)
    )
    theirs = ours.select(*_WHERE, "seed", "value", reference="row")
    pairs = ours.join(theirs, on=[*_WHERE, "seed", "reference"], nulls_equal=True, maintain_order="left")
    groups = pairs.filter(pl.col("reference").is_not_null()).group_by(
        *_WHERE, *_WHO, *_WHAT, "reference", maintain_order=True
    )
    return table(
        _of_runs(row | {"metric": difference_to(row.pop("reference"), metric)}, Estimate.of_differences)
        for row in _rows(groups.agg(pl.col("value") - pl.col("value_right")))
    )


def difference_to(reference: str, metric: str) -> str:
    """Return what the difference of a metric to that of another row is called."""
    return f"{metric}, difference to {reference}"


def _of_runs(group: dict[str, Any], estimated: Callable[[Sequence[float]], Estimate]) -> Fact:
    """Return the fact that the values of a group of runs come to."""
    values = group.pop("value")
    return fact(estimate=estimated(values), **group)


def _rows(frame: pl.DataFrame) -> Iterator[dict[str, Any]]:
    return frame.iter_rows(named=True)


def _known(value: float) -> float | None:
    return None if isnan(value) else value
