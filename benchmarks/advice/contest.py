"""The contest: engines are timed against autograd on the user's batches, within a time budget.

The compiled model is timed in a process of its own that can be killed: compiling has no time limit.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, isfinite, nan
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from gradfree import engine_figures, gradient_fidelity
from gradfree.benchmarks.advice.job import Batch, Job
from gradfree.benchmarks.advice.time_limit import TimeIsOver, time_limit
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.benchmarks.timing.side_by_side import collecting_errors, now, statistics
from gradfree.cli import UsageError
from gradfree.time.layout_report import layout_notes

COMPILED = "torch.compile"
_NO_TIME = "no time was left, give a longer --budget"
_WARM_UP = 3
_TURN = 0.02
"""A turn repeats shorter steps for this many seconds."""
_MAX_RATIO = 1.25
"""A row whose first turn takes more than this multiple of the baseline's time has no further turns."""
_HOPELESS = 4.0
"""The same limit for the second step; five times as much for the first step, which includes setup."""
_LONG = 0.1
"""For steps of this many seconds, two steps are enough as warm-up and first turn."""
_SETUP = 1.0
"""An engine has so many seconds at least for its first steps."""
_FEWEST, _MOST = 3, 25
"""Minimal and maximal number of rounds. Long steps have no minimum: their first two steps count as rounds."""
_ROUNDS = 5
"""Number of rounds of the compiled model."""
_MEMORY_STEPS = 1.5
"""Time of the step that measures memory, in steps."""
LEAST_STEPS = 4
"""A contest takes at least the time of so many steps of autograd: two of autograd, two of an engine."""
_STATE_HINT = (
    " A model that keeps a state from batch to batch must cut the gradient there: self.state = state.detach(), of an "
    "LSTM both parts."
)
_describe = "{0.__class__.__name__}: {0}".format
"""Returns the text stored for an error."""


@dataclass(eq=False)
class Contestant:
    """A row in training on a copy of the user's model.

    Attributes:
        row: the engine.
        step: takes a training step on a batch and returns the loss.
        times: mean seconds of a step in each round.
        cost: the :func:`statistics` of ``times`` relative to autograd's, round by round; empty if there are none.
        cosine: cosine of the gradient with the exact one.
        memory: peak bytes of a step.
        first_ratio: the first turn's time as a multiple of autograd's, if there were no further turns; if that turn was
            stopped, what it had taken by then.
        notes: what recurrent layers ran packed sequences as.
    """

    row: Row
    step: Callable[[Batch], Tensor]
    times: list[float] = field(default_factory=list)
    cost: Mapping[str, Any] = field(default_factory=dict)
    cosine: float = nan
    memory: int | None = None
    first_ratio: float | None = None
    notes: Sequence[str] = ()

    @property
    def usual(self) -> float:
        """The seconds of a step, from what was timed so far; the first step includes setup."""
        return median(self.times[1:] or self.times)

    @classmethod
    def of(cls, row: Row, model: nn.Module, job: Job) -> Contestant:
        """Return ``row`` on a copy of ``model`` that is trained by AdamW.

        The learning rate is 0: a model that diverges would be timed with NaN.
        """
        own = copy.deepcopy(model)
        if row is not BACKPROP:
            row.create_engine().attach(own, job.chains)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.0)

        def step(batch: Batch) -> Tensor:
            optimizer.zero_grad()
            loss = job.loss_of(own, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return cls(row, step)

    def turn(self, job: Job, n: int) -> float:
        """Return the mean seconds of a few steps, in the ``n``-th round."""
        batch = job.batches[n % len(job.batches)]
        usual = self.usual if self.times else _TURN
        if usual < _LONG:
            self.step(batch)  # The caches have what the contestant before has used.
        return self.seconds(job, batch, max(1, ceil(_TURN / usual)))

    def seconds(self, job: Job, batch: Batch, steps: int = 1, losses: list[Tensor] | None = None) -> float:
        """Return the mean seconds of ``steps`` steps, without the warm-up of torch's Timer: a step may take seconds.

        Their losses are added to ``losses``.
        """
        start = now(job.device)
        found = [self.step(batch) for _ in range(steps)]
        seconds = (now(job.device) - start) / steps
        if losses is not None:
            losses += found
        return seconds


@dataclass
class Standings:
    """The results of a contest.

    Attributes:
        contestants: all rows that ran, autograd first.
        failures: errors by label.
        untried: labels of rows that were not timed for lack of time.
        compiled: the :func:`statistics` of the compiled model's times relative to autograd's, or why there are none.
    """

    contestants: list[Contestant]
    failures: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    compiled: Mapping[str, Any] | str = ""


def baseline(job: Job, model: nn.Module) -> Contestant:
    """Return autograd after two steps or more, the last of them timed.

    Raises:
        UsageError: autograd fails, or its loss is not finite.
    """
    try:
        plain = Contestant.of(BACKPROP, model, job)
        plain.cosine = 1.0
        losses: list[Tensor] = []
        plain.times = [plain.seconds(job, job.batches[0], losses=losses) for _ in range(2)]
        if plain.times[1] < _LONG:
            losses += [plain.step(batch) for batch in job.batches]
            # Another process may have disturbed this turn: the step stays a short one.
            plain.times = [min(plain.times[1], plain.turn(job, 0))]
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        hint = _STATE_HINT if "through the graph a second time" in str(error) else ""
        raise UsageError(f"{job.model} cannot be trained on {job.data}: {_describe(error)}{hint}") from error
    if not all(isfinite(loss) for loss in losses):
        raise UsageError(
            f"the loss of {job.model} on a batch of {job.data} is not finite, so engines cannot be compared: look for "
            "NaN or infinite numbers in the data."
        )
    return plain


def contest(job: Job, model: nn.Module, plain: Contestant, rows: Sequence[Row], end: float) -> Standings:
    """Time autograd and ``rows`` in turns, until the time is over or the maximal number of rounds is reached.

    A row whose first turn is much slower than autograd's has no further turns. The first row is always tried; another
    one only if its steps, were they as fast as autograd's, and the rounds of all fit into the time.

    Args:
        job: the model and its data.
        model: the model to copy.
        plain: autograd, from :func:`baseline`.
        rows: the rows to try, the most promising first.
        end: when the time is over, on the clock ``monotonic``; a step in a round that has begun is finished.
    """
    usual, close, standings = plain.usual, [plain], Standings([plain])
    taken = {plain.row.label: usual}
    for n, candidate in enumerate(rows):
        label, left = candidate.label, end - monotonic()
        left -= min((_FEWEST + _MEMORY_STEPS) * sum(taken.values()), left / 2)
        if n and left < 2 * usual:
            standings.untried.append(label)
            continue
        with collecting_errors(standings.failures, label, _describe):
            contestant = _tried(candidate, model, plain, job, usual, max(left, 2 * usual, _SETUP))
            if contestant is None:
                standings.untried.append(label)
                continue
            standings.contestants.append(contestant)
            if contestant.first_ratio is None:
                close.append(contestant)
                taken[label] = contestant.usual
    if usual < _LONG:
        for contestant in close:
            contestant.times = []
    _take_turns(close, job, standings, _FEWEST if usual < _LONG else 0, end)
    for contestant in close:
        contestant.cost = statistics(contestant.times, plain.times)
        if monotonic() + _MEMORY_STEPS * contestant.usual < end:
            step = partial(contestant.step, job.batches[0])
            contestant.memory = peak_memory(step, torch.device(job.device))
    return standings


def _tried(
    candidate: Row, model: nn.Module, plain: Contestant, job: Job, usual: float, seconds: float
) -> Contestant | None:
    """Return a contestant after its first turn and, unless it is too slow, with the cosine of its gradient.

    Short steps are compared with autograd timed at the same moment, long ones with its first time ``usual``, to save
    the budget for the candidates. Returns ``None`` if ``seconds`` do not suffice to know that it is too slow.
    """
    contestant = Contestant.of(candidate, model, job)
    start = monotonic()
    try:
        with time_limit(seconds):
            for hopeless in (5 * _HOPELESS, _HOPELESS):
                with engine_figures() as figures:
                    contestant.times.append(contestant.seconds(job, job.batches[0]))
                ratio = contestant.times[-1] / usual
                if ratio > hopeless:
                    break
            else:
                if usual < _LONG:
                    ratio = median(contestant.turn(job, n) / plain.turn(job, n) for n in range(_WARM_UP))
                elif ratio > _MAX_RATIO:
                    # Once more: another process may have disturbed this step.
                    contestant.times[-1] = min(contestant.times[-1], contestant.seconds(job, job.batches[0]))
                    ratio = contestant.times[-1] / usual
            if ratio > _MAX_RATIO:
                contestant.first_ratio = ratio
                return contestant
            contestant.notes = [*layout_notes(figures)]
            # On a copy, since a model may keep activations, with which it could not be copied for the next candidate.
            own, engine = copy.deepcopy(model), candidate.create_engine()
            contestant.cosine = gradient_fidelity(engine, own, job.loss_fn, job.batches[0], job.chains).total.cosine
    except TimeIsOver:
        contestant.first_ratio = (monotonic() - start) / usual
        return contestant if contestant.first_ratio > _HOPELESS and len(contestant.times) < 2 else None
    return contestant


def _take_turns(close: list[Contestant], job: Job, standings: Standings, fewest: int, end: float) -> None:
    """Time ``close`` in rounds until the time ``end``, with at least ``fewest`` and at most ``_MOST`` rounds."""
    round_takes = sum(contestant.usual for contestant in close if contestant.times)
    for n in range(_MOST):
        start = monotonic()
        memory = _MEMORY_STEPS * round_takes if n >= _FEWEST else 0.0
        if n >= fewest and start + round_takes + memory > end:
            return
        for contestant in list(close):
            label = contestant.row.label
            with collecting_errors(standings.failures, label, _describe):
                contestant.times.append(contestant.turn(job, n))
            if label in standings.failures:
                close.remove(contestant)
                standings.contestants.remove(contestant)
        round_takes = monotonic() - start


def compiled_cost(job: Job, threads: int, seconds: float) -> dict[str, Any] | str:
    """Return the times of a compiled step and their ratios to an eager step's, or why there are none.

    Args:
        job: the model and its data.
        threads: number of threads of torch.
        seconds: time limit of compiling and timing.
    """
    if seconds <= 0:
        return _NO_TIME
    # Leaving the pool ends its process. Its job is a copy without the cached batches.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            found: dict[str, Any] | str = pool.apply_async(_compiled_times, (replace(job), threads)).get(seconds)
            return found
        except multiprocessing.TimeoutError:
            return f"not compiled and timed in {seconds:.0f} s, give a longer --budget"


def _compiled_times(job: Job, threads: int) -> dict[str, Any] | str:
    torch.set_num_threads(threads)
    try:
        plain, compiled = (_in_turns(job, compiled) for compiled in (False, True))
        times = [(next(plain), next(compiled)) for _ in range(_ROUNDS)]
    except Exception as error:
        # As text, since not every exception can be sent to another process.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return statistics([own for _, own in times], [own for own, _ in times])


def _in_turns(job: Job, compiled: bool) -> Iterator[float]:
    """Yield the mean seconds of a step, again and again, after a warm-up."""
    model = job.build()
    if compiled:
        model.compile()
    contestant = Contestant.of(BACKPROP, model, job)
    contestant.step(job.batches[0])
    contestant.times = [contestant.seconds(job, job.batches[0])]
    while True:
        yield contestant.turn(job, 0)
