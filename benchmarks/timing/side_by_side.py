"""Interleaved timing: steps take turns, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.facts import Estimate, Fact, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.chains.handle import Handle
from gradfree.cli import UsageError
from gradfree.devices.hardware import synchronize

STEP, MEMORY, PROCESS, PASSES = "step time", "peak memory", "process peak", "time of forward and backward"
MIB = 2**20
RATIO = "×"
"""Placeholder unit of a declared column: replaced by :func:`times` of the baseline."""


@dataclass(frozen=True)
class Trainee:
    """A model that is trained on the same batch in every step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    handle: Handle = field(default_factory=Handle)

    @classmethod
    def of(cls, task: Task, row: Row, device: str, seed: int) -> Trainee:
        """Return ``task``'s model with ``row``'s engine attached, and its first batch."""
        model = task.create_model(seed).to(device)
        optimizer, _ = task.create_optimizer(model)
        batch = task.on(device, next(task.batches(task.data().train, seed)))
        handle = row.create_engine().attach(model, task.chains)
        return cls(model, optimizer, task.loss, batch.inputs, batch.targets, handle)

    def passes(self) -> None:
        """Run forward and backward pass."""
        self.optimizer.zero_grad()
        with self.handle.lesson(self.targets, self._loss):
            self._loss().backward()

    def _loss(self) -> Tensor:
        return self.loss(self.model(self.inputs), self.targets)

    def __call__(self) -> None:
        """Take a training step."""
        self.passes()
        self.optimizer.step()

    def peak_memory(self) -> int:
        """Return the peak bytes of one step that starts without gradients."""
        self.optimizer.zero_grad()
        return peak_memory(self, self.inputs.device)


@contextmanager
def collecting_errors(errors: dict[str, str], label: str, describe: Callable[[Exception], str]) -> Iterator[None]:
    """Suppress an exception and store ``describe(error)``; the exception itself would keep a step's memory alive.

    UsageErrors are not suppressed.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        errors[label] = describe(error)


def now(device: torch.device | str) -> float:
    """Return the time in seconds, after ``device`` has finished its queued work."""
    synchronize(torch.device(device))
    return perf_counter()


def mean_seconds(step: Callable[[], object], runs: int) -> float:
    """Return the mean seconds of ``step`` over ``runs`` runs."""
    # Not at the top of the file, since some versions of torch ask for an accelerator when this is imported.
    from torch.utils.benchmark import Timer

    return Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()).timeit(runs).mean


def interleaved(turns: Sequence[Callable[[], float]], rounds: int, repeats: int) -> list[list[float]]:
    """Call all ``turns`` in each round; return the seconds of each over the rounds.

    Args:
        turns: functions that return their seconds; the first is the baseline.
        rounds: number of rounds.
        repeats: the most sets of ``rounds`` rounds; another one follows as long as a ratio to the baseline is not
            steady (:func:`~gradfree.benchmarks.tables.verdict.steady`).
    """
    taken: list[list[float]] = [[] for _ in turns]
    for _ in range(repeats):
        for _ in range(rounds):
            for own, turn in zip(taken, turns, strict=True):
                own.append(turn())
        if all(verdict.steady(Estimate.recorded(statistics(own, taken[0]), "ratio")) for own in taken):
            break
    return taken


def statistics(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return ``times`` with median and quartiles, also those of the ratios to ``baseline`` in the same rounds."""
    ratios = [time / base for time, base in zip(times, baseline, strict=True)]
    return {
        "times": times,
        "time": median(times),
        "time_quartiles": quantiles(times)[::2],
        "ratio": median(ratios),
        "ratio_quartiles": quantiles(ratios)[::2],
    }


def cost_facts(
    cost: Mapping[str, Any], baseline: Mapping[str, Any], metric: str = STEP, /, **who: Any
) -> Iterator[Fact]:
    """Yield a row's time and memory, also as multiples of the baseline's; nothing if it was not timed."""
    if "time" in cost:
        yield fact(metric, "s", Estimate.recorded(cost, "time"), **who)
        yield fact(metric, times(baseline["label"]), Estimate.recorded(cost, "ratio"), **who)
    if "peak_memory" in cost:
        yield fact(MEMORY, "MiB", cost["peak_memory"] / MIB, **who)
        yield fact(MEMORY, times(baseline["label"]), cost["peak_memory"] / baseline["peak_memory"], **who)
    if "process_peak" in cost:
        yield fact(PROCESS, "MiB", cost["process_peak"] / MIB, **who)


def legend_of_process(facts: pl.DataFrame) -> str:
    """Return what the process peaks among the facts are; empty if there are none."""
    if PROCESS not in facts["metric"]:
        return ""
    return (
        " Process peak, in MiB: the most memory of a new process that builds the row and runs two steps, with imports."
    )


def times(baseline: str) -> str:
    """Return the unit of a multiple of ``baseline``'s cost."""
    return f"{RATIO} {baseline}"
