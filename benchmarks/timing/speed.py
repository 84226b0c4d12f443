"""How fast things are, side by side: in turns, in one process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from traceback import TracebackException
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer, set_torch_threads

from gradfree.benchmarks.records.case import ADDED, Case, Row
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.profiles import peak_memory

_WARM_UP = 3


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


_ROUNDS = 9
_RUNS = 3

T = TypeVar("T")
Step = TypeVar("Step", bound=Callable[[], Any])
"""What is timed."""
Turn = Sequence[float]
"""The seconds of each phase of a step, or of all of it, if it is not taken apart."""
Turns = Mapping[str, Sequence[Turn]]
"""Of each step, by label."""
Errors = Mapping[str, TracebackException]
"""Of the steps that cannot be taken, by label."""


@dataclass(frozen=True, kw_only=True)
class Timing(Case, Generic[Step]):
    """Time of several steps, all in one process.

    They take turns, so that a slow spell of the machine falls on all of them, and each round's times are divided by
    the first one's, the baseline's. One that cannot be taken costs the others no timing.

    Attributes:
        rows: the engines under test; none where it is no engines that are compared.
        threads: for torch to use; left out, as many as it does.
        rounds: in which each step has its turn, after one to warm up.
        runs: of a step in a turn.
    """

    rows: tuple[Row, ...] = field(default=(), metadata=ADDED)
    threads: int | None = field(default=None, metadata=ADDED)
    rounds: ClassVar[int] = _ROUNDS
    runs: ClassVar[int] = _RUNS

    @property
    def subject(self) -> str:
        """What takes turns."""
        return self.sides if self.threads is None else f"{self.sides}, {self.threads} threads"

    @property
    def sides(self) -> str:
        """What is compared, for people."""
        return "all rows"

    @abstractmethod
    def steps(self) -> Mapping[str, Callable[[], Step]]:
        """Return what builds each step, by its label; the first is the baseline."""

    def turn(self, step: Step) -> Turn:
        """Take a step some times; return the mean."""
        return (clocked(step, self.runs),)

    def costs(self, step: Step, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return what else there is to tell of a step than how long it took."""
        return {}

    def run(self) -> dict[str, Any]:
        """Measure; return for each row its times in seconds, ratios to the baseline and other costs, or its error."""
        return self.results(*self.measured())

    def measured(self) -> tuple[dict[str, Step], Turns, Errors]:
        """Return the steps that could be taken, their turns, and the errors of the others."""
        with set_torch_threads(self.threads or torch.get_num_threads()):
            steps, errors = self._started()
            turns = in_turns([partial(self.turn, step) for step in steps.values()], self.rounds)
        return steps, dict(zip(steps, turns, strict=True)), errors

    def results(self, steps: Mapping[str, Step], turns: Turns, errors: Errors) -> dict[str, Any]:
        """Return what to record of the ``turns`` that steps had, and of the ``errors`` of others, by label."""
        times = {label: [sum(turn) for turn in own] for label, own in turns.items()}
        baseline = next(iter(times.values()))
        found = {
            label: {"label": label, **statistics(own, baseline), **self.costs(steps[label], turns[label])}
            for label, own in times.items()
        }
        found |= {row["label"]: row for row in failures(errors)}
        return {"rows": [found[label] for label in self.steps() if label in found]}

    def _started(self) -> tuple[dict[str, Step], Errors]:
        """Return the steps that a first turn could be taken with, warm, and the errors of the others."""
        steps: dict[str, Step] = {}
        errors: dict[str, TracebackException] = {}
        for label, build in self.steps().items():
            # Without the baseline nothing can be told of the others.
            with noted(errors, label, TracebackException.from_exception) if steps else nullcontext():
                step = build()
                self.turn(step)
                steps[label] = step
        return steps, errors


@dataclass(frozen=True, kw_only=True)
class Speed(Timing[Trainee]):
    """Time and peak memory of one training step of every row."""

    kind: ClassVar[str] = "speed"
    task: Task

    def steps(self) -> Mapping[str, Callable[[], Trainee]]:
        """Return what builds a model in training with each row's engine."""
        return {row.label: partial(Trainee.of, self.task, row, self.device, self.seed) for row in self.rows}

    def costs(self, step: Trainee, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the peak memory in bytes."""
        return {"peak_memory": step.peak_memory()}


@contextmanager
def noted(errors: dict[str, T], label: str, told: Callable[[Exception], T]) -> Iterator[None]:
    """Go on behind an error, and keep what is ``told`` of it: the error itself would keep the memory of a step."""
    try:
        yield
    except Exception as error:
        errors[label] = told(error)


def now(device: torch.device | str) -> float:
    """Return the time in seconds, once ``device`` has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def clocked(step: Callable[[], object], runs: int = _RUNS) -> float:
    """Return how many seconds ``step`` takes, a mean over ``runs``."""
    return Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()).timeit(runs).mean


def in_turns(turns: Sequence[Callable[[], T]], rounds: int = _ROUNDS) -> list[list[T]]:
    """Return for each of ``turns`` what it returns in every round, all of them warm."""
    taken = ([turn() for turn in turns] for _ in range(rounds))
    return [list(own) for own in zip(*taken, strict=True)]


def failures(errors: Errors) -> list[dict[str, Any]]:
    """Return what to record of steps that could not be taken, by label."""
    return [{"label": label, "error": "".join(error.format()).strip()} for label, error in errors.items()]


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
