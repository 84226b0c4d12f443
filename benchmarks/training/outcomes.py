"""The facts that training runs and timings of engines on a task tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isnan, nan
from statistics import fmean
from typing import Any

import polars as pl

from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.estimates import Estimate, pareto_front
from gradfree.benchmarks.tables.facts import Fact, estimates, fact, run_fact, select, table
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import STEP, times
from gradfree.benchmarks.training.training import score_in

FAILED, RATE, COSINE, FRONT = "failed runs", "learning rate", "cosine with the exact gradient", "on the Pareto front"
LOSS = "training loss"
_FAILED = "failed"


def scored(task: Task, split: str = "test") -> str:
    """Return the metric of the scores."""
    return f"{split} {task.score.name}"


def whole_cosine(probe: Mapping[str, Any]) -> float:
    """Return the cosine of the whole gradient at one step."""
    return float(probe["cosine"])


def run_facts(
    task: Task,
    runs: Sequence[Record],
    learning_rate: float,
    cosine: Callable[[Mapping[str, Any]], float] = whole_cosine,
    /,
    **who: Any,
) -> Iterator[Fact]:
    """Yield what the training runs of an engine came to, each by itself, and how many failed."""
    errors = list(dict.fromkeys(error for run in runs if (error := error_of(run))))
    failed = sum(bool(error_of(run)) for run in runs)
    yield fact(FAILED, "1", failed, note="; ".join(errors), **who)
    yield fact(RATE, "1", learning_rate, **who)
    if failed and failed == len(runs):
        yield fact(scored(task), task.score.unit, note=_FAILED, **who)
    for run in runs:
        if not error_of(run):
            seed, results = run["seeds"][0], run["results"]
            for split in ("validation", "test"):
                yield run_fact(scored(task, split), task.score.unit, score_in(results, split), seed, **who)
            if probes := results["fidelity"]:
                yield run_fact(COSINE, "1", fmean(map(cosine, probes)), seed, **who)


def loss_facts(runs: Sequence[Record], /, **who: Any) -> Iterator[Fact]:
    """Yield the training loss of each run on the way."""
    for run in runs:
        for told in run["results"].get("losses", ()):
            place = {"setting": f"step {told['step']}", "at": float(told["step"])}
            yield run_fact(LOSS, "1", told["loss"], run["seeds"][0], **who, **place)


def front_facts(task: Task, facts: pl.DataFrame, baseline: str) -> pl.DataFrame:
    """Return for each row whether it is shown to be better than all that are faster."""
    scores, ratios = estimates(facts, metric=scored(task)), estimates(facts, metric=STEP, unit=times(baseline))
    rows = list(select(facts, metric=FAILED).iter_rows(named=True))
    unknown = Estimate()
    front = pareto_front(
        [(ratios.get(r["row"], unknown).value, _goodness(task, scores.get(r["row"], unknown))) for r in rows]
    )
    who = ("task", "device", "threads", "row", "series", "k")
    return table(fact(FRONT, "1", float(n in front), **{name: r[name] for name in who}) for n, r in enumerate(rows))


def _goodness(task: Task, score: Estimate) -> Estimate:
    """Return ``score`` with the sign that makes more better."""
    ends = (nan, nan) if isnan(score.low) else sorted(map(task.score.goodness, (score.low, score.high)))
    return Estimate(task.score.goodness(score.value), *ends)
