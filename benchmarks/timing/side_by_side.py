"""Steps that take turns, so that a slow spell of the machine falls on all of them; how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from traceback import TracebackException
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.facts import Estimate, Fact, fact, select
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.cli import UsageError
from gradfree.devices.hardware import synchronize

_WARM_UP = 3
T = TypeVar("T")
Turn = Sequence[float]
"""The seconds of each phase of a step, or of all of it, if it is not taken apart."""
Turns = Mapping[str, Sequence[Turn]]
"""Of each step, by label."""
Errors = Mapping[str, TracebackException]
"""Of the steps that cannot be taken, by label."""
STEP, MEMORY, PASSES = "step time", "peak memory", "time of forward and backward"
MIB = 2**20
RATIO = "×"
"""The unit of a declared column that stands for multiples of the baseline's."""
ERROR = "error"


@dataclass(frozen=True)
class Trainee:
    """A model in training on one batch over and over."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor

    @classmethod
    def of(cls, task: Task, row: Row, device: str, seed: int) -> Trainee:
        """Return ``task``'s model with ``row``'s engine, and its first batch."""
        model = task.create_model(seed).to(device)
        optimizer, _ = task.create_optimizer(model)
        batch = task.on(device, next(task.batches(task.data().train, seed)))
        task.attach(row.create_engine(), model)
        return cls(model, optimizer, task.loss, batch.inputs, batch.targets)

    def passes(self) -> None:
        """Run forward and backward pass."""
        self.optimizer.zero_grad()
        self.loss(self.model(self.inputs), self.targets).backward()

    def __call__(self) -> None:
        """Take a training step."""
        self.passes()
        self.optimizer.step()

    def step_time(self) -> float:
        """Return how many seconds a step takes, a median, once warm."""
        timer = Timer("step()", globals={"step": self}, num_threads=torch.get_num_threads())
        timer.timeit(_WARM_UP)
        return timer.blocked_autorange(min_run_time=0.5).median

    def peak_memory(self) -> int:
        """Return the peak in bytes of one step that starts without gradients."""
        self.optimizer.zero_grad()
        return peak_memory(self, self.inputs.device)


@contextmanager
def noted(errors: dict[str, T], label: str, describe: Callable[[Exception], T]) -> Iterator[None]:
    """Go on behind an error, and keep what ``describe`` makes of it: the error itself would keep the memory of a step.

    What the user has to put right ends all.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        errors[label] = describe(error)


def now(device: torch.device | str) -> float:
    """Return the time in seconds, once ``device`` has done what it was given."""
    synchronize(torch.device(device))
    return perf_counter()


def clocked(step: Callable[[], object], runs: int = 3) -> float:
    """Return how many seconds ``step`` takes, a mean over ``runs``."""
    return Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()).timeit(runs).mean


def in_turns(turns: Sequence[Callable[[], T]], rounds: int = 9) -> list[list[T]]:
    """Return for each of ``turns`` what it returns in every round, all of them warm."""
    taken = ([turn() for turn in turns] for _ in range(rounds))
    return [list(own) for own in zip(*taken, strict=True)]


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


def failures(facts: pl.DataFrame) -> Iterator[str]:
    """Yield what did not run, in words."""
    for row in select(facts, metric=ERROR).iter_rows(named=True):
        what = ", ".join(row[name] for name in ("setting", "row") if row[name])
        yield f"{what} did not run: {row['note']}."


def cost_facts(cost: Mapping[str, Any], exact: Mapping[str, Any], metric: str = STEP, /, **who: Any) -> Iterator[Fact]:
    """Yield what a row costs, also as a multiple of the baseline's; nothing if it was not timed."""
    if "time" in cost:
        yield fact(metric, "s", Estimate.recorded(cost, "time"), **who)
        yield fact(metric, times(exact["label"]), Estimate.recorded(cost, "ratio"), **who)
    if "peak_memory" in cost:
        yield fact(MEMORY, "MiB", cost["peak_memory"] / MIB, **who)
        yield fact(MEMORY, times(exact["label"]), cost["peak_memory"] / exact["peak_memory"], **who)


def times(baseline: str) -> str:
    """Return the unit of multiples of the baseline's."""
    return f"{RATIO} {baseline}"


def time_of(phase: str) -> str:
    """Return the metric of a phase of a step."""
    return f"time of {phase}"
