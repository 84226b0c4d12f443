"""Facts: numbers with intervals, in a tidy table with one fact a row. Every figure of a report comes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan, nan, sqrt
from statistics import fmean, stdev
from typing import Any

from gradfree.benchmarks.tables.frames import pl
from gradfree.wording import plain

_CONFIDENCE = 0.95
_ALIKE = 1e-4
"""Differences that vary by at most this share of their mean count as equal: the rest is rounding."""
FEWEST = 3
"""Minimal number of seeds for an interval to be shown and judged: with two, Student's t is 12.7."""
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
    "note": str,
}
"""Columns of the table.

task, device, threads: what was run, and on what.
setting, at: the setting, if an experiment has several, in words and as a number: "5 hidden layers", 5.
row, series, k: the row's label, the chart line that it is a point of, and its iterations.
seed: the seed of a single run; null for a mean of several.
metric, unit: what is measured.
value: null if unknown, NaN if a run diverged.
low, high, interval: the value's interval and its kind, :data:`MEAN` or :data:`MEDIAN`.
n: number of runs in the mean.
note: text, mostly the reason for a missing value.
"""
MEAN, MEDIAN = "95 % CI", "quartiles"
_WHERE = ("task", "device", "threads", "setting", "at")
_WHO = ("row", "series", "k")
_WHAT = ("metric", "unit")
Fact = dict[str, Any]
"""A row of the table; missing columns are null."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; unknown values are NaN.

    Attributes:
        value: a mean over seeds, or a median of timing rounds.
        low: lower end of the mean's 95 % confidence interval, or the lower quartile.
        high: the upper end.
        n: number of seeds; 0 for a median.
    """

    value: float = nan
    low: float = nan
    high: float = nan
    n: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of ``values``, one a seed, with its Student's t interval; NaN if a value is not finite."""
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
        """Return the mean of ``values``, which are differences between two runs of the same seed.

        Equal differences other than 0 get no interval, since Student's t would give one of width 0. They are common
        for accuracies on few examples.
        """
        mean = cls.of(values)
        alike = mean.margin <= _ALIKE * abs(mean.value)
        return replace(mean, low=nan, high=nan) if alike and mean.value else mean

    @classmethod
    def recorded(cls, results: Mapping[str, Any], name: str) -> Estimate:
        """Return the estimate that :func:`~gradfree.benchmarks.timing.side_by_side.statistics` recorded as ``name``."""
        return cls(results[name], *results[f"{name}_quartiles"])

    @property
    def margin(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def relative(self) -> float:
        """Distance from the value to the farther end of the interval, as a share of the value."""
        return max(self.high - self.value, self.value - self.low) / self.value


def fact(metric: str, unit: str, estimate: Estimate | float = nan, **context: Any) -> Fact:
    """Return the fact that ``metric`` is ``estimate``; without ``n``, the interval is a median's quartiles."""
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
    """Return the data frame of ``facts``.

    Raises:
        ValueError: a fact has an unknown column.
    """
    rows = list(facts)
    if strange := {name for row in rows for name in row} - SCHEMA.keys():
        raise ValueError(f"facts have no {', '.join(sorted(strange))}; their columns are {', '.join(SCHEMA)}.")
    return pl.DataFrame(rows, schema=SCHEMA)


def select(facts: pl.DataFrame, **where: Any) -> pl.DataFrame:
    """Return the facts with these values; facts of single runs only if ``where`` has ``seed``."""
    wanted = {"seed": None, **where}
    return facts.filter(pl.all_horizontal(pl.col(name).eq_missing(value) for name, value in wanted.items()))


def estimate_of(row: Mapping[str, Any]) -> Estimate:
    """Return the value of a fact with its interval."""
    value, low, high = (nan if row[name] is None else row[name] for name in ("value", "low", "high"))
    return Estimate(value, low, high, row["n"] or 0)


def estimates(facts: pl.DataFrame, by: str = "row", **where: Any) -> dict[Any, Estimate]:
    """Return the known estimates of the facts with these values, by row or by another column."""
    known = select(facts, **where).filter(pl.col("value").is_not_null())
    return {row[by]: estimate_of(row) for row in known.iter_rows(named=True)}


def run_fact(metric: str, unit: str, value: float, seed: int, **context: Any) -> Fact:
    """Return the fact that a single run's result is ``value``; NaN if it diverged."""
    return fact(metric, unit, Estimate(value, n=1), seed=seed, **context)


def with_means(single: pl.DataFrame, metric: str, references: Mapping[str, str]) -> pl.DataFrame:
    """Return the facts of single runs with their means, and with the :func:`differences` in ``metric``."""
    return pl.concat([single, means(single), differences(single, metric, references)])


def means(found: pl.DataFrame) -> pl.DataFrame:
    """Return the means of single runs' facts over seeds, with intervals."""
    groups = found.filter(pl.col("seed").is_not_null()).group_by(*_WHERE, *_WHO, *_WHAT, maintain_order=True)
    return table(_summarized(row, Estimate.of) for row in groups.agg("value").iter_rows(named=True))


def differences(found: pl.DataFrame, metric: str, references: Mapping[str, str]) -> pl.DataFrame:
    """Return the mean difference, seed by seed, between each row's ``metric`` and its reference row's.

    Rows without a reference, or with no seed in common with it, are left out.
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
        _summarized(row | {"metric": difference_to(row.pop("reference"), metric)}, Estimate.of_differences)
        for row in groups.agg(pl.col("value") - pl.col("value_right")).iter_rows(named=True)
    )


def difference_to(reference: str, metric: str) -> str:
    """Return the name of the metric "difference to another row"."""
    return f"{metric}, difference to {reference}"


def _summarized(group: dict[str, Any], estimated: Callable[[Sequence[float]], Estimate]) -> Fact:
    """Return the fact that summarizes the values of a group of runs."""
    values = group.pop("value")
    return fact(estimate=estimated(values), **group)


def _known(value: float) -> float | None:
    return None if isnan(value) else value
