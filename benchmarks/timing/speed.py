"""How fast things are, side by side: in turns, in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch.utils.benchmark import Timer

from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.trainee import Trainee

_ROUNDS = 9
_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Speed(Case):
    """Time and peak memory of one training step of every row, all in one process.

    The rows take turns, so that a slow spell of the machine falls on all of them, and each round's times are
    divided by its first row's, the baseline's.
    """

    kind: ClassVar[str] = "speed"
    task: Task
    rows: tuple[Row, ...]

    subject = "all rows"

    @property
    def topic(self) -> str:
        """The task."""
        return self.task.name

    def run(self) -> dict[str, Any]:
        """Measure; return for each row its times in seconds, ratios to the baseline and peak memory in bytes.

        Of a row that cannot take a step, its error; the others are timed without it.
        """
        started = {row.label: self._start(row) for row in self.rows}
        trainees = {label: own for label, own in started.items() if isinstance(own, Trainee)}
        times = compared(trainees, interleaved([trainee.step for trainee in trainees.values()]))
        costs = {cost["label"]: cost | {"peak_memory": trainees[cost["label"]].peak_memory()} for cost in times}
        return {"rows": [costs.get(label, {"label": label, "error": error}) for label, error in started.items()]}

    def _start(self, row: Row) -> Trainee | str:
        """Return a model that has taken a step with ``row``'s engine, or the error of one that cannot."""
        try:
            trainee = Trainee(self.task, row, self.device, self.seed)
            trainee.step()
        except Exception:
            # Without the baseline nothing can be told of the others.
            if row is self.rows[0]:
                raise
            return traceback.format_exc().strip()
        return trainee


@dataclass(frozen=True, kw_only=True)
class Timing(Case):
    """Time of all rows in turns.

    Attributes:
        rows: the engines.
        threads: for torch to use.
    """

    rows: tuple[Row, ...]
    threads: int

    @property
    def subject(self) -> str:
        """All rows."""
        return f"all rows, {self.threads} threads"


def now(device: torch.device | str) -> float:
    """Return the time in seconds, once ``device`` has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def interleaved(steps: Sequence[Callable[[], object]], runs: int = _STEPS) -> list[list[float]]:
    """Return for each of ``steps`` its mean time in seconds over ``runs`` in every round, once all have warmed up."""
    timers = [Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()) for step in steps]
    for timer in timers:
        timer.timeit(runs)
    rounds = [[timer.timeit(runs).mean for timer in timers] for _ in range(_ROUNDS)]
    return [list(times) for times in zip(*rounds, strict=True)]


def compared(labels: Iterable[str], times: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row for each label with the statistics of its ``times``; the first is the baseline."""
    return [{"label": label, **statistics(own, times[0])} for label, own in zip(labels, times, strict=True)]


def statistics(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return ``times`` with median and quartiles, also of the ratios to ``baseline`` of the same rounds."""
    ratios = [time / base for time, base in zip(times, baseline, strict=True)]
    return {
        "times": times,
        "time": median(times),
        "time_quartiles": quantiles(times)[::2],
        "ratio": median(ratios),
        "ratio_quartiles": quantiles(ratios)[::2],
    }
