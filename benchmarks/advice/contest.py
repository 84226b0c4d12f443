"""Engines timed against plain backpropagation on a user's own batches, within a budget of time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, isfinite
from statistics import median, quantiles
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
from gradfree.wording import count

_WARM_UP = 3
_TURN = 0.02
"""Seconds of steps in a turn, if a step takes less."""
_IN_SIGHT = 1.25
"""Of the baseline's time: what takes longer when first tried has no further turns."""
_HOPELESS = 4.0
"""Likewise, of the second step alone, and five times that of the first, which has to prepare much."""
_LONG = 0.1
"""Seconds of a step from which on one is enough to warm up, or to try a candidate by."""
_FEWEST, _MOST = 5, 25
"""Rounds."""
_SAME = {"dsf feedback=gate": "highway_bp k=0", "truncated window=2": "fixed_point k=1"}
"""Settings whose gradients are those of others, by label."""
_EXACT = Agreement(1.0, 1.0, 0.0)
"""Of plain backpropagation, whatever it keeps."""
_CARRIED = (
    " A model that keeps a state from batch to batch must cut the gradient there: self.state = state.detach(), of an "
    "LSTM both parts."
)
_words = "{0.__class__.__name__}: {0}".format
"""What is kept of an error."""
Say = Callable[[str], None]


class Budget:
    """A time that runs out.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, none at the least."""
        return max(0.0, self._end - monotonic())


@dataclass(eq=False)
class Contestant:
    """A row in training on a copy of the user's model.

    Attributes:
        row: the engine.
        model: with the engine attached.
        step: takes a training step on a batch and returns the loss.
        times: seconds of a step, a mean in each round.
        gradient: compared with exact backpropagation's; ``None`` if not yet compared.
        memory: peak in bytes of a step.
        first: what a step came to beside plain backprop's when first tried, if it had no further turns.
    """

    row: Row
    model: nn.Module
    step: Callable[[Batch], Tensor]
    times: list[float] = field(default_factory=list)
    gradient: Agreement | None = None
    memory: int | None = None
    first: float | None = None

    @classmethod
    def of(cls, row: Row, model: nn.Module, job: Job, learning_rate: float = 0.0) -> Contestant:
        """Attach the engine of ``row`` to a copy of ``model``, to be trained by AdamW.

        Without a learning rate the weights stay: a model that diverges would be timed with NaN.
        """
        own = copy.deepcopy(model)
        if row is not BACKPROP:
            row.create_engine().attach(own, job.chains)
        optimizer = torch.optim.AdamW(own.parameters(), lr=learning_rate)

        def step(batch: Batch) -> Tensor:
            optimizer.zero_grad()
            loss = job.loss_of(own, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return cls(row, own, step)


@dataclass
class Standings:
    """What a contest came to.

    Attributes:
        threads: that torch used.
        why: that many.
        contestants: all that took part, plain backprop first.
        failures: what went wrong, by label.
        untried: labels that there was no time for.
    """

    threads: int
    why: str
    contestants: list[Contestant]
    failures: dict[str, str]
    untried: list[str]

    def cost(self, contestant: Contestant) -> dict[str, Any]:
        """Return times and ratios to plain backprop's, round by round, as :func:`statistics` has them."""
        baseline = self.contestants[0].times
        return statistics(contestant.times, baseline[: len(contestant.times)])


def rows_to_try(
    model: nn.Module, chains: Sequence[str] | None, engines: Sequence[str]
) -> tuple[dict[str, Report], list[Row]]:
    """Return the report on ``model`` of every one of ``engines``, and rows of those that can be attached.

    The most promising first: engines that say to be as exact as backpropagation, then those with several settings,
    every one's first settings before any one's second, then the others.
    """
    reports = {name: engine_class(name)().validate(model, chains) for name in engines}
    fit = [name for name, report in reports.items() if report.ok and report.chains]
    found = [
        (*_promise(name, n), row(name, given))
        for name in fit
        for n, given in enumerate(engine_class(name).worth_trying)
    ]
    ordered = [candidate for _, _, candidate in sorted(found, key=lambda known: known[:2])]
    labels = {candidate.label for candidate in ordered}
    ordered = [candidate for candidate in ordered if _SAME.get(candidate.label) not in labels]
    return reports, ordered


def _promise(name: str, n: int) -> tuple[int, int]:
    """Return what comes first if it is less: of an engine with its ``n``-th settings."""
    exact = bool(engine_class(name).exact_ones())
    return (0 if exact else 1 if len(engine_class(name).worth_trying) > 1 else 2), n


def contest(job: Job, model: nn.Module, rows: Sequence[Row], budget: Budget, say: Say) -> Standings:
    """Time plain backpropagation and ``rows`` in turns, until ``budget`` is spent or the figures stand.

    Whoever takes much longer than plain backprop when first tried has no further turns.

    Args:
        job: what is trained.
        model: that the copies are of.
        rows: to try, the most promising first.
        budget: of time; what is begun is ended.
        say: is given what is being done.

    Raises:
        UsageError: plain backpropagation fails.
    """
    failures: dict[str, str] = {}
    say("autograd")
    every = torch.get_num_threads()
    # Where others compute as well, threads that wait for each other may take a hundred times as long.
    torch.set_num_threads(1)
    with collecting_errors(failures, BACKPROP.label, _words):
        plain = Contestant.of(BACKPROP, model, job)
        step = partial(plain.step, job.batches[0])
        loss = float(step())
        if not isfinite(loss):
            raise UsageError(
                f"the loss of {job.model} on the first batch of {job.data} is {loss}: look for NaN or infinite numbers "
                "in the data. No engine can be judged by it."
            )
        if mean_seconds(step, 1) < _LONG:
            mean_seconds(step, _WARM_UP)
        plain.gradient = _EXACT
    if failures:
        hint = _CARRIED if "through the graph a second time" in failures[BACKPROP.label] else ""
        raise UsageError(f"{job.model} cannot be trained on {job.data}: {failures[BACKPROP.label]}{hint}")
    threads, why = _choose_threads(every, plain, job, budget, say)
    standings, usual = Standings(threads, why, [plain], failures, []), _turn(plain, job, 0)
    for candidate in rows:
        exact = bool(engine_class(candidate.engine).exact_ones())
        # On a busy machine too, somebody has a turn.
        if budget.left <= (0.0 if exact else 0.4 * budget.seconds) and len(standings.contestants) > 1:
            standings.untried.append(candidate.label)
            continue
        say(candidate.label)
        if problems := candidate.create_engine().validate(copy.deepcopy(model), job.chains, batch=job.inputs).problems:
            failures[candidate.label] = "; ".join(problems)
            continue
        with collecting_errors(failures, candidate.label, _words):
            standings.contestants.append(_tried(candidate, model, plain, job, usual))
    close = [c for c in standings.contestants if c.first is None]
    _compare_gradients([c for c in close if c is not plain], job, standings, say)
    _take_turns(close, job, standings, budget, say)
    _compare_gradients([c for c in standings.contestants if c.first and budget.left], job, standings, say)
    # Those that take their time may do so for less memory.
    for contestant in (*close, *(c for c in standings.contestants if c.first and budget.left)):
        say(f"memory of {contestant.row.label}")
        step = partial(contestant.step, job.batches[0])
        contestant.memory = peak_memory(step, torch.device(job.device))
    return standings


def _choose_threads(every: int, plain: Contestant, job: Job, budget: Budget, say: Say) -> tuple[int, str]:
    """Let torch use all threads or one, whichever is faster in all but a quarter of the turns."""
    if every == 1 or job.device != "cpu":
        torch.set_num_threads(every)
        return every, ""
    late: dict[int, float] = {}
    for threads in (1, every):
        say(f"autograd, {threads} threads" if threads > 1 else "autograd, one thread")
        torch.set_num_threads(threads)
        end, hopeless = Budget(budget.seconds / 20), _HOPELESS * min(late.values(), default=inf)
        times = [_turn(plain, job, n) for n in range(2)]
        while min(times) < hopeless and ((end.left and len(times) < _MOST) or len(times) < _WARM_UP):
            times.append(_turn(plain, job, len(times)))
        late[threads] = quantiles(times)[2]
    chosen = min(late, key=lambda threads: late[threads])
    torch.set_num_threads(chosen)
    words = ", ".join(f"{1e3 * t:.1f} ms with {count(n, 'thread')}" for n, t in late.items())
    return chosen, f"three quarters of autograd's steps take at most {words}"


def _turn(contestant: Contestant, job: Job, n: int) -> float:
    """Return the mean seconds of a few steps, in the ``n``-th round."""
    step = partial(contestant.step, job.batches[n % len(job.batches)])
    usual = median(contestant.times) if contestant.times else _TURN
    return mean_seconds(step, max(1, ceil(_TURN / usual)) if usual < _TURN else 1)


def _tried(candidate: Row, model: nn.Module, plain: Contestant, job: Job, usual: float) -> Contestant:
    """Return a contestant with its first turn behind it, and what it comes to beside plain backprop's of now.

    Where that takes long, beside what it took at first, ``usual``: its time is better spent on the candidates.
    """
    contestant = Contestant.of(candidate, model, job)
    step = partial(contestant.step, job.batches[0])
    long = usual > _LONG
    usual = usual if long else _turn(plain, job, 0)
    for hopeless in (5 * _HOPELESS, _HOPELESS):
        if (ratio := mean_seconds(step, 1) / usual) > hopeless:
            contestant.first = ratio
            return contestant
    if not long:
        for _ in range(_WARM_UP - 1):
            step()
        ratio = median(_turn(contestant, job, n) / _turn(plain, job, n) for n in range(_WARM_UP))
    if ratio > _IN_SIGHT:
        contestant.first = ratio
    return contestant


def _take_turns(close: list[Contestant], job: Job, standings: Standings, budget: Budget, say: Say) -> None:
    """Time ``close`` in rounds, until the budget is spent."""
    for n in range(_MOST):
        if n >= _FEWEST and not budget.left:
            return
        for contestant in list(close):
            label = contestant.row.label
            say(f"{label}, round {n + 1}")
            with collecting_errors(standings.failures, label, _words):
                contestant.times.append(_turn(contestant, job, n))
            if label in standings.failures:
                close.remove(contestant)
                standings.contestants.remove(contestant)


def _compare_gradients(contestants: Sequence[Contestant], job: Job, standings: Standings, say: Say) -> None:
    for contestant in (c for c in contestants if c.gradient is None):
        say(f"gradient of {contestant.row.label}")
        with collecting_errors(standings.failures, contestant.row.label, _words):
            engine, plain = contestant.row.create_engine(), standings.contestants[0].model
            contestant.gradient = gradient_fidelity(engine, plain, job.loss_fn, job.batches[0], job.chains).total
