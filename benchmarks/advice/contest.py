"""The contest: engines are timed against autograd on the user's batches, within a time budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, isfinite
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from gradfree import gradient_fidelity
from gradfree.benchmarks.advice.job import Batch, Job
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.sweeps.sweep import row
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.benchmarks.timing.side_by_side import collecting_errors, mean_seconds, statistics
from gradfree.chains.report import Report
from gradfree.cli import UsageError
from gradfree.fidelity import Agreement
from gradfree.registry import engine_class

_WARM_UP = 3
_TURN = 0.02
"""A turn repeats shorter steps for this many seconds."""
_MAX_RATIO = 1.25
"""A row whose first turn takes more than this multiple of the baseline's time has no further turns."""
_HOPELESS = 4.0
"""The same limit for the second step; five times as much for the first step, which includes setup."""
_LONG = 0.1
"""For steps of this many seconds, one step is enough as a warm-up and as a first turn."""
_FEWEST, _MOST = 5, 25
"""Minimal and maximal number of rounds."""
_SAME = {"dsf feedback=gate": "highway_bp k=0", "truncated window=2": "fixed_point k=1"}
"""Rows with the same gradients as another row, by label: they are not tried if the other one is."""
_EXACT = Agreement(1.0, 1.0, 0.0)
"""The agreement of autograd with itself."""
_STATE_HINT = (
    " A model that keeps a state from batch to batch must cut the gradient there: self.state = state.detach(), of an "
    "LSTM both parts."
)
_describe = "{0.__class__.__name__}: {0}".format
"""Returns the text stored for an error."""
Say = Callable[[str], None]


class Budget:
    """A time limit.

    Args:
        seconds: seconds from now.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds, at least 0."""
        return max(0.0, self._end - monotonic())


@dataclass(eq=False)
class Contestant:
    """A row in training on a copy of the user's model.

    Attributes:
        row: the engine.
        model: the copy with the engine attached.
        step: takes a training step on a batch and returns the loss.
        times: mean seconds of a step in each round.
        gradient: agreement with the exact gradient; ``None`` if not compared yet.
        memory: peak bytes of a step.
        first_ratio: the first turn's time as a multiple of autograd's, if there were no further turns.
    """

    row: Row
    model: nn.Module
    step: Callable[[Batch], Tensor]
    times: list[float] = field(default_factory=list)
    gradient: Agreement | None = None
    memory: int | None = None
    first_ratio: float | None = None

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

        return cls(row, own, step)


@dataclass
class Standings:
    """The results of a contest.

    Attributes:
        contestants: all rows that ran, autograd first.
        failures: errors by label.
        untried: labels of rows that did not run for lack of time.
    """

    contestants: list[Contestant]
    failures: dict[str, str]
    untried: list[str]

    def cost(self, contestant: Contestant) -> dict[str, Any]:
        """Return the :func:`statistics` of a contestant's times relative to autograd's, round by round."""
        baseline = self.contestants[0].times
        return statistics(contestant.times, baseline[: len(contestant.times)])


def rows_to_try(
    model: nn.Module, chains: Sequence[str] | None, engines: Sequence[str]
) -> tuple[dict[str, Report], list[Row]]:
    """Return the report of each engine on ``model``, and the rows of those that can be attached.

    The rows come in order of promise: exact engines, engines with several settings, the others. Within a group, the
    first settings of all engines come before any second settings.
    """
    reports = {name: engine_class(name)().validate(model, chains) for name in engines}
    fit = [name for name, report in reports.items() if report.ok and report.chains]
    found = [
        (*_priority(name, n), row(name, given))
        for name in fit
        for n, given in enumerate(engine_class(name).worth_trying)
    ]
    ordered = [candidate for _, _, candidate in sorted(found, key=lambda known: known[:2])]
    labels = {candidate.label for candidate in ordered}
    ordered = [candidate for candidate in ordered if _SAME.get(candidate.label) not in labels]
    return reports, ordered


def _priority(name: str, n: int) -> tuple[int, int]:
    """Return the sort key of an engine with its ``n``-th settings."""
    exact = bool(engine_class(name).exact_ones())
    return (0 if exact else 1 if len(engine_class(name).worth_trying) > 1 else 2), n


def contest(job: Job, model: nn.Module, rows: Sequence[Row], budget: Budget, say: Say) -> Standings:
    """Time autograd and ``rows`` in turns, until the budget is spent or the maximal number of rounds is reached.

    A row whose first turn is much slower than autograd's has no further turns.

    Args:
        job: the model and its data.
        model: the model to copy.
        rows: the rows to try, the most promising first.
        budget: the time limit; a step that has begun is finished.
        say: called with the current activity.

    Raises:
        UsageError: autograd fails.
    """
    failures: dict[str, str] = {}
    say("autograd")
    with collecting_errors(failures, BACKPROP.label, _describe):
        plain = Contestant.of(BACKPROP, model, job)
        step = partial(plain.step, job.batches[0])
        loss = float(step())
        if not isfinite(loss):
            raise UsageError(
                f"the loss of {job.model} on the first batch of {job.data} is {loss}, so engines cannot be compared: "
                "look for NaN or infinite numbers in the data."
            )
        if mean_seconds(step, 1) < _LONG:
            mean_seconds(step, _WARM_UP)
        plain.gradient = _EXACT
    if failures:
        hint = _STATE_HINT if "through the graph a second time" in failures[BACKPROP.label] else ""
        raise UsageError(f"{job.model} cannot be trained on {job.data}: {failures[BACKPROP.label]}{hint}")
    standings, usual = Standings([plain], failures, []), _turn(plain, job, 0)
    for candidate in rows:
        exact = bool(engine_class(candidate.engine).exact_ones())
        # Even on a busy machine, at least one engine is tried.
        if budget.left <= (0.0 if exact else 0.4 * budget.seconds) and len(standings.contestants) > 1:
            standings.untried.append(candidate.label)
            continue
        say(candidate.label)
        if problems := candidate.create_engine().validate(copy.deepcopy(model), job.chains, batch=job.inputs).problems:
            failures[candidate.label] = "; ".join(problems)
            continue
        with collecting_errors(failures, candidate.label, _describe):
            standings.contestants.append(_first_turn(candidate, model, plain, job, usual))
    close = [c for c in standings.contestants if c.first_ratio is None]
    _compare_gradients([c for c in close if c is not plain], job, standings, say)
    _take_turns(close, job, standings, budget, say)
    for contestant in close:
        say(f"memory of {contestant.row.label}")
        step = partial(contestant.step, job.batches[0])
        contestant.memory = peak_memory(step, torch.device(job.device))
    return standings


def _turn(contestant: Contestant, job: Job, n: int) -> float:
    """Return the mean seconds of a few steps, in the ``n``-th round."""
    step = partial(contestant.step, job.batches[n % len(job.batches)])
    usual = median(contestant.times) if contestant.times else _TURN
    return mean_seconds(step, max(1, ceil(_TURN / usual)) if usual < _TURN else 1)


def _first_turn(candidate: Row, model: nn.Module, plain: Contestant, job: Job, usual: float) -> Contestant:
    """Return a contestant after its first turn, compared with autograd timed at the same moment.

    If autograd's step is long, its first time ``usual`` is used instead, to save the budget for the candidates.
    """
    contestant = Contestant.of(candidate, model, job)
    step = partial(contestant.step, job.batches[0])
    long = usual > _LONG
    usual = usual if long else _turn(plain, job, 0)
    for hopeless in (5 * _HOPELESS, _HOPELESS):
        if (ratio := mean_seconds(step, 1) / usual) > hopeless:
            contestant.first_ratio = ratio
            return contestant
    if not long:
        for _ in range(_WARM_UP - 1):
            step()
        ratio = median(_turn(contestant, job, n) / _turn(plain, job, n) for n in range(_WARM_UP))
    if ratio > _MAX_RATIO:
        contestant.first_ratio = ratio
    return contestant


def _take_turns(close: list[Contestant], job: Job, standings: Standings, budget: Budget, say: Say) -> None:
    """Time ``close`` in rounds until the budget is spent, with at least ``_FEWEST`` and at most ``_MOST`` rounds."""
    for n in range(_MOST):
        if n >= _FEWEST and not budget.left:
            return
        for contestant in list(close):
            label = contestant.row.label
            say(f"{label}, round {n + 1}")
            with collecting_errors(standings.failures, label, _describe):
                contestant.times.append(_turn(contestant, job, n))
            if label in standings.failures:
                close.remove(contestant)
                standings.contestants.remove(contestant)


def _compare_gradients(contestants: Sequence[Contestant], job: Job, standings: Standings, say: Say) -> None:
    for contestant in (c for c in contestants if c.gradient is None):
        say(f"gradient of {contestant.row.label}")
        with collecting_errors(standings.failures, contestant.row.label, _describe):
            engine, plain = contestant.row.create_engine(), standings.contestants[0].model
            contestant.gradient = gradient_fidelity(engine, plain, job.loss_fn, job.batches[0], job.chains).total
