"""How time and memory of a step grow with one setting of a task, where several comparisons differ in nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure
from gradfree.benchmarks.tables.experiment import Finding
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import MEMORY, STEP
from gradfree.benchmarks.training.comparison import Comparison

_NAME = "name"
"""The setting in which tasks always differ."""
_OF_A_STEP = ("batch_size", "data.", "options.")
"""What the settings begin with that a step's cost may depend on."""

_FOLLOWERS = {"data.length": "options.context"}
"""Settings that another one entails."""

_TIME = Figure(STEP, "{value:.1f}", "s", 1e3)
_PEAK = Figure(MEMORY, "{value:.1f}", "MiB")
Timed: TypeAlias = "tuple[Task, pl.DataFrame]"
"""A task and what its steps cost."""


def trends(found: Sequence[Finding]) -> Iterator[Section]:
    """Yield a section for each setting with several timed values, and on each device, in the most comparisons."""
    groups: defaultdict[tuple[str, str, Hashable], dict[int, Timed]] = defaultdict(dict)
    for experiment, facts in found:
        costs = facts.filter(pl.col("metric").is_in([STEP, MEMORY]), pl.col("unit").is_in(["s", "MiB"]))
        if not isinstance(experiment, Comparison) or costs.is_empty():
            continue
        settings = dict(_settings(experiment.task))
        for axis, value in settings.items():
            if axis.startswith(_OF_A_STEP) and isinstance(value, int) and value > 0:
                ignored = {axis, _NAME, _FOLLOWERS.get(axis)}
                others = frozenset((name, repr(other)) for name, other in settings.items() if name not in ignored)
                groups[axis, costs["device"][0], others][value] = experiment.task, costs
    largest: dict[tuple[str, str], dict[int, Timed]] = {}
    for (axis, device, _), group in groups.items():
        if len(group) > max(1, len(largest.get((axis, device), ()))):
            largest[axis, device] = group
    for (axis, device), group in largest.items():
        yield _section(axis.rpartition(".")[2].replace("_", " "), device, dict(sorted(group.items())))


def _settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings of a task, by path."""
    if is_dataclass(value):
        inner: Mapping[str, Any] = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        inner = value
    else:
        yield path, value
        return
    for name, setting in inner.items():
        yield from _settings(setting, f"{path}.{name}" if path else name)


def _section(axis: str, device: str, group: Mapping[int, Timed]) -> Section:
    task, _ = next(iter(group.values()))
    facts = pl.concat(
        costs.with_columns(setting=pl.lit(str(value)), at=pl.lit(float(value))) for value, (_, costs) in group.items()
    )
    where, across = f"{task.model}, {device}", Axis(f"{axis} (count)", "counts")
    return Section(
        title=f"cost against {axis}: {task.model}, from {task.name}, device: {device}",
        facts=facts,
        columns=[Column(str(value), (_TIME, _PEAK), {"setting": str(value)}) for value in group],
        legend=f"Columns: {axis}. Time of a training step in ms, median, and in brackets its peak memory in MiB.",
        charts=[
            Chart(
                f"{where}: {what} against {axis}",
                points(facts, "at", figure, label="row"),
                across,
                Axis(name, "log"),
                "solid",
            )
            for what, figure, name in (
                ("time", _TIME, "time of a step (ms)"),
                ("memory", _PEAK, "peak memory of a step (MiB)"),
            )
        ],
    )
