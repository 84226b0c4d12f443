"""What training runs depend on besides the engine: model, optimizer, batches, data; and what engines do by default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import polars as pl
from torch import nn

from gradfree import Engine
from gradfree.benchmarks.data.bundled import Data
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.facts import Fact, fact, select
from gradfree.benchmarks.tasks.task import Task

MODEL, OPTIMIZER, BATCH, RATE, OWN = (
    "model",
    "optimizer",
    "batch size",
    "learning rate of all rows",
    "engine's defaults",
)
_SPLITS = ("train", "validation", "test")
_SIZES = {"parameters": "parameters", **{split: f"{split} examples" for split in _SPLITS}}


def sizes(model: nn.Module, data: Data) -> dict[str, int]:
    """Return what to record of a run's sizes."""
    counts = {split: len(getattr(data, split).inputs) for split in _SPLITS}
    return {"parameters": sum(p.numel() for p in model.parameters()), **counts}


def defaults(engine: Engine, given: Mapping[str, Any]) -> str:
    """Return the options that an engine has of itself, none of those that are ``given`` or off."""
    options = {f.name: getattr(engine, f.name) for f in fields(engine)} if is_dataclass(engine) else {}
    own = {
        name: value for name, value in options.items() if name not in given and value is not None and value is not False
    }
    return ", ".join(f"{name}={value}" for name, value in own.items())


def setup_facts(task: Task, grid: Sequence[float], runs: Iterable[Record], /, **where: Any) -> Iterator[Fact]:
    """Yield what all rows' ``runs`` depend on; sizes where they are recorded and of all runs the same."""
    yield fact(MODEL, "", note=task.architecture, **where)
    yield fact(OPTIMIZER, "", note=task.optimizer, **where)
    yield fact(BATCH, "examples", task.batch_size, **where)
    if not grid:
        yield fact(RATE, "1", task.learning_rate, **where)
    recorded = [run["results"]["sizes"] for run in runs if "sizes" in run["results"]]
    for name, metric in _SIZES.items():
        if len(counts := {found[name] for found in recorded}) == 1:
            yield fact(metric, "count", counts.pop(), **where)


def defaults_facts(row: Row, runs: Iterable[Record], /, **who: Any) -> Iterator[Fact]:
    """Yield the options that a row does not name: as recorded, or as they are now."""
    recorded = (run["results"]["defaults"] for run in runs if "defaults" in run["results"])
    told = next(recorded, None)
    told = defaults(row.create_engine(), row.options) if told is None else told
    if told:
        yield fact(OWN, "", note=f"{row.engine}({told})", **who)


def setup_words(task: Task, facts: pl.DataFrame) -> str:
    """Return what the facts tell of it, in sentences."""
    known = {told["metric"]: told for told in select(facts, row=None).iter_rows(named=True)}
    counts = {name: f"{known[metric]['value']:,.0f}" for name, metric in _SIZES.items() if metric in known}
    model = known[MODEL]["note"] + (f", {counts['parameters']} parameters" if "parameters" in counts else "")
    rate = f" at {known[RATE]['value']:g}" if RATE in known else " at the row's rate"
    of = f" of {counts['train']} examples" if "train" in counts else " examples"
    words = (
        f"Trained: {model}, by {known[OPTIMIZER]['note']}{rate}, {task.course}; {known[BATCH]['value']:.0f}{of} a batch"
    )
    if "test" in counts:
        words += f"; validated on {counts['validation']}, tested on {counts['test']}"
    own = select(facts, metric=OWN)["note"].unique(maintain_order=True).to_list()
    return f"{words}." + (f" Options that rows do not name: {'; '.join(own)}." if own else "")
