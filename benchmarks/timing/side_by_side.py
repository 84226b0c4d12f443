"""How fast things are, side by side: cases that time steps in turns, in one process, and experiments of such cases."""

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
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.experiment import Experiment, outcomes
from gradfree.benchmarks.tables.facts import Estimate, Fact, fact, select, table
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.cli import UsageError
from gradfree.devices.device import synchronize

_WARM_UP = 3
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
STEP, MEMORY = "step time", "peak memory"
MIB = 2**20
_ERROR = "error"
Subject = TypeVar("Subject")


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
        weighed: whether peak memory is measured, too.
    """

    rows: tuple[Row, ...] = field(default=(), metadata=ADDED)
    threads: int | None = field(default=None, metadata=ADDED)
    rounds: ClassVar[int] = _ROUNDS
    runs: ClassVar[int] = _RUNS
    weighed: ClassVar[bool] = False

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
        """Return what else there is to tell of a step than how long it took: peak memory in bytes, if it is weighed."""
        if not self.weighed:
            return {}
        return {"peak_memory": step.peak_memory() if isinstance(step, Trainee) else peak_memory(step, self.device)}

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
    weighed: ClassVar[bool] = True
    task: Task

    def steps(self) -> Mapping[str, Callable[[], Trainee]]:
        """Return what builds a model in training with each row's engine."""
        return {row.label: partial(Trainee.of, self.task, row, self.device, self.seed) for row in self.rows}


@contextmanager
def noted(errors: dict[str, T], label: str, told: Callable[[Exception], T]) -> Iterator[None]:
    """Go on behind an error, and keep what is ``told`` of it: the error itself would keep the memory of a step.

    What the user has to put right ends all.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        errors[label] = told(error)


def now(device: torch.device | str) -> float:
    """Return the time in seconds, once ``device`` has done what it was given."""
    synchronize(device)
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


@dataclass(frozen=True)
class Timings(Experiment, Generic[Subject]):
    """Engines on some subjects.

    Attributes:
        subjects: what is run: layers, models, sizes.
        rows: the engines; none where it is no engines that are compared.
        threads: for torch to use; left out, as many as it does.
        metric: what the time of a step is called.
        timed: the kind of case that times all rows on a subject.
    """

    subjects: tuple[Subject, ...]
    rows: tuple[Row, ...] = ()
    threads: int | None = None
    metric: ClassVar[str] = STEP
    timed: ClassVar[type[Case]]

    def case(self, subject: Subject, /, **where: Any) -> Case:
        """Return the case that times all rows on ``subject``, with its ``rows``, ``threads``, ``device`` and seed."""
        return self.timed(**where | {self.timed.topic_field: subject})

    def timing(self, device: str) -> Iterator[Case]:
        """Yield one case a subject."""
        for subject in self.subjects:
            yield self.case(subject, rows=self.rows, threads=self.threads, device=device, seed=0)

    def where(self, case: Case) -> dict[str, Any]:
        """Return what tells a case's facts from those of other cases."""
        return {"setting": case.topic}

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return what each row takes; nothing if all cases failed."""
        place = {"device": device, "threads": self.threads}
        found = table(
            place | self.where(case) | told
            for case in self.timing(device)
            for record in outcomes(records, case)
            for told in self.told(case, record)
        )
        return found if found["value"].count() else found.clear()

    def told(self, case: Case, record: Record) -> Iterator[Fact]:
        """Yield what a case's record tells of each row, or that it failed."""
        if error := error_of(record):
            yield fact(_ERROR, "", note=error)
        results = record["results"]
        named = {row.label: row for row in self.rows}
        for cost in results.get("rows", ()):
            label = cost["label"]
            who = named[label].named if label in named else {"row": label, "series": label, "k": None}
            yield from (told | who for told in self.cost(cost, results))
        for label, error in results.get("errors", {}).items():
            yield fact(_ERROR, "", note=error, row=label)

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what is recorded of a row, or its error."""
        if "error" in cost:
            yield fact(_ERROR, "", note=cost["error"].splitlines()[-1])
        yield from cost_facts(cost, results["rows"][0], self.metric)

    def failures(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield what did not run, in words."""
        for told in select(facts, metric=_ERROR).iter_rows(named=True):
            what = ", ".join(told[name] for name in ("setting", "row") if told[name])
            yield f"{what} did not run: {told['note']}."


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
    return f"× {baseline}"


def time_of(phase: str) -> str:
    """Return the metric of a phase of a step."""
    return f"time of {phase}"
