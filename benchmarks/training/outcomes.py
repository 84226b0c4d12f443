"""Facts from the records of training runs: their settings, scores, cosines and losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite, isnan, nan
from statistics import fmean
from typing import Any

from torch import nn

from gradfree import Engine
from gradfree.benchmarks.data.bundled import Data
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimates, fact, run_fact, select, table
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import STEP, times

FAILED, RATE, COSINE, FRONT = "failed runs", "learning rate", "cosine with the exact gradient", "on the Pareto front"
CHAIN = "cosine of the chains' gradient with the exact one"
LOSS = "training loss"
_OWN = "engine's defaults"
_SIZES = {"parameters": "parameters", **{split: f"{split} examples" for split in Data._fields}}


def score_in(results: Mapping[str, Any], name: str) -> float:
    """Return a score of a run; NaN if the last loss is not finite."""
    # Old records have accuracies of models with NaN weights.
    losses = results.get("losses")
    return nan if losses and not isfinite(losses[-1]["loss"]) else results.get(name, nan)


def sizes(model: nn.Module, data: Data) -> dict[str, int]:
    """Return the number of parameters and of examples, to be recorded."""
    counts = {split: len(getattr(data, split).inputs) for split in Data._fields}
    return {"parameters": sum(p.numel() for p in model.parameters()), **counts}


def defaults(engine: Engine, given: Mapping[str, Any]) -> str:
    """Return the engine's options that are not ``given``, without those that are ``None`` or ``False``."""
    options = {f.name: getattr(engine, f.name) for f in fields(engine)} if is_dataclass(engine) else {}
    own = {
        name: value for name, value in options.items() if name not in given and value is not None and value is not False
    }
    return ", ".join(f"{name}={value}" for name, value in own.items())


def size_facts(runs: Iterable[Record], /, **where: Any) -> Iterator[Fact]:
    """Yield the numbers of parameters and examples, if recorded and equal in all ``runs``."""
    recorded = [run["results"]["sizes"] for run in runs if "sizes" in run["results"]]
    for name, metric in _SIZES.items():
        if len(counts := {found[name] for found in recorded}) == 1:
            yield fact(metric, "count", counts.pop(), **where)


def setup_words(task: Task, own_rates: bool, facts: pl.DataFrame) -> str:
    """Return sentences on the model, the optimizer and the data; ``own_rates``: rows have their own learning rates."""
    known = estimates(facts, by="metric", row=None)
    counts = {name: f"{known[metric].value:,.0f}" for name, metric in _SIZES.items() if metric in known}
    options = ", ".join(f"{name}={value}" for name, value in task.options.items())
    parameters = f", {counts['parameters']} parameters" if "parameters" in counts else ""
    rate = "the row's rate" if own_rates else f"{task.learning_rate:g}"
    of = f" of {counts['train']} examples" if "train" in counts else " examples"
    words = f"Trained: {task.model}({options}){parameters}, by {task.optimizer} at {rate}, {task.course}"
    words += f"; {task.batch_size}{of} a batch"
    if "test" in counts:
        words += f"; validated on {counts['validation']}, tested on {counts['test']}"
    own = select(facts, metric=_OWN)["note"].unique(maintain_order=True).to_list()
    return f"{words}." + (f" Default options: {'; '.join(own)}." if own else "")


def edge_remarks(grid: Sequence[float], facts: pl.DataFrame) -> Iterator[str]:
    """Yield a sentence on the rows whose best learning rate is at an end of ``grid``, if there are any."""
    rates = select(facts, metric=RATE).filter(pl.col("value").is_in([*grid[:1], *grid[-1:]]))
    edge = [
        row["row"] + ("" if row["at"] is None else f" at {row['at']:g}") + f" ({row['value']:g})"
        for row in rates.iter_rows(named=True)
    ]
    if edge:
        yield f"Best learning rate at the edge of the grid, maybe better beyond it: {', '.join(edge)}."


def score_metric(task: Task, split: str = "test") -> str:
    """Return the name of a score as a metric."""
    return f"{split} {task.score.name}"


def run_facts(task: Task, row: Row, runs: Sequence[Record], learning_rate: float, /, **who: Any) -> Iterator[Fact]:
    """Yield the scores and cosines of each run of a row, how many runs failed, and the engine's default options.

    Old records have no defaults; then those of today are taken.
    """
    errors = [error for run in runs if (error := error_of(run))]
    yield fact(FAILED, "1", len(errors), note="; ".join(dict.fromkeys(errors)), **who)
    yield fact(RATE, "1", learning_rate, **who)
    if errors and len(errors) == len(runs):
        yield fact(score_metric(task), task.score.unit, note="failed", **who)
    for run in runs:
        if not error_of(run):
            seed, results = run["seeds"][0], run["results"]
            for split in ("validation", "test"):
                yield run_fact(score_metric(task, split), task.score.unit, score_in(results, split), seed, **who)
            if probes := results["fidelity"]:
                yield run_fact(COSINE, "1", fmean(map(_cosine, probes)), seed, **who)
                if "chain" in probes[0]:
                    yield run_fact(CHAIN, "1", fmean(probe["chain"] for probe in probes), seed, **who)
    recorded = [run["results"]["defaults"] for run in runs if "defaults" in run["results"]]
    if options := (recorded or [defaults(row.create_engine(), row.options)])[0]:
        yield fact(_OWN, "", note=f"{row.engine}({options})", **who)


def _cosine(probe: Mapping[str, Any]) -> float:
    """Return the gradient's cosine at one step; the mean over hidden layers if it is recorded by layer."""
    return fmean(probe["layers"][:-1]) if "layers" in probe else float(probe["cosine"])


def loss_facts(runs: Sequence[Record], /, **who: Any) -> Iterator[Fact]:
    """Yield the recorded training losses of each run."""
    for run in runs:
        for loss in run["results"].get("losses", ()):
            place = {"setting": f"step {loss['step']}", "at": float(loss["step"])}
            yield run_fact(LOSS, "1", loss["loss"], run["seeds"][0], **who, **place)


def front_facts(task: Task, facts: pl.DataFrame, baseline: str) -> pl.DataFrame:
    """Return for each row whether it is on the Pareto front of step time and score, by differences seed by seed.

    A row is on the front if it is better than every faster row of the front. Rows whose step time shows no difference
    from the baseline's count as equally fast, the baseline as the first of them.
    """
    goodness: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for run in facts.filter(pl.col("seed").is_not_null(), metric=score_metric(task)).iter_rows(named=True):
        goodness[run["row"]][run["seed"]] = task.score.goodness(run["value"])
    ratios = estimates(facts, metric=STEP, unit=times(baseline))
    known = [row for row, seeds in goodness.items() if row in ratios and all(map(isfinite, seeds.values()))]

    def is_better(row: str, other: str) -> bool:
        own, others = goodness[row], goodness[other]
        difference = Estimate.of_differences([own[seed] - others[seed] for seed in own.keys() & others.keys()])
        return (difference.value if isnan(difference.margin) else difference.low) > 0

    def speed(row: str) -> tuple[float, bool]:
        ratio = ratios[row]
        return 1.0 if ratio.low <= 1.0 <= ratio.high else ratio.value, row != baseline

    front: list[str] = []
    for row in sorted(known, key=speed):
        if all(is_better(row, other) for other in front):
            front.append(row)
    who = select(facts, metric=FAILED).select("task", "device", "threads", "row", "series", "k")
    return table(fact(FRONT, "1", float(row["row"] in front), **row) for row in who.iter_rows(named=True))
