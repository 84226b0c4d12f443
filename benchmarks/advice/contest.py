"""The contest: engines are timed against autograd on the user's batches, within a time budget.

The compiled model is timed in a process of its own that can be killed: compiling has no time limit.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, isfinite, nan
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
from gradfree.benchmarks.timing.side_by_side import collecting_errors, interleaved, mean_seconds, statistics
from gradfree.chains.report import Report
from gradfree.cli import UsageError
from gradfree.registry import engine_class

COMPILED = "torch.compile"
_WARM_UP = 3
_TURN = 0.02
"""A turn repeats shorter steps for this many seconds."""
_MAX_RATIO = 1.25
"""A row whose first turn takes more than this multiple of the baseline's time has no further turns."""
_HOPELESS = 4.0
"""The same limit for the second step; five times as much for the first step, which includes setup."""
_LONG = 0.1
"""For steps of this many seconds, two steps are enough as warm-up and first turn."""
_FEWEST, _MOST = 5, 25
"""Minimal and maximal number of rounds."""
_SAME = {"dsf feedback=gate": "highway_bp k=0", "truncated window=2": "fixed_point k=1"}
"""Rows with the same gradients as another row, by label: they are not tried if the other one is."""
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
        first_ratio: the first turn's time as a multiple of autograd's, if there were no further turns.
    """

    row: Row
    step: Callable[[Batch], Tensor]
    times: list[float] = field(default_factory=list)
    cost: Mapping[str, Any] = field(default_factory=dict)
    cosine: float = nan
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

        return cls(row, step)

    def turn(self, job: Job, n: int) -> float:
        """Return the mean seconds of a few steps, in the ``n``-th round."""
        step = partial(self.step, job.batches[n % len(job.batches)])
        usual = median(self.times) if self.times else _TURN
        return mean_seconds(step, max(1, ceil(_TURN / usual)) if usual < _TURN else 1)


@dataclass
class Standings:
    """The results of a contest.

    Attributes:
        contestants: all rows that ran, autograd first.
        failures: errors by label.
        untried: labels of rows that did not run for lack of time.
        compiled: the :func:`statistics` of the compiled model's times relative to autograd's, or why there are none.
    """

    contestants: list[Contestant]
    failures: dict[str, str] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    compiled: Mapping[str, Any] | str = ""


def rows_to_try(
    model: nn.Module, chains: Sequence[str] | None, engines: Sequence[str]
) -> tuple[dict[str, Report], list[Row]]:
    """Return the report of each engine on ``model``, and the rows of those that can be attached.

    The rows come in order of promise: exact engines, engines with several settings, the others. Within a group, the
    first settings of all engines come before any second settings.
    """
    reports = {name: engine_class(name)().validate(model, chains) for name in engines}
    found: list[tuple[tuple[int, int], Row]] = []
    for name in (name for name, report in reports.items() if report.ok and report.chains):
        settings = engine_class(name).worth_trying
        group = 0 if is_exact(name) else 1 if len(settings) > 1 else 2
        found += [((group, n), row(name, given)) for n, given in enumerate(settings)]
    ordered = [candidate for _, candidate in sorted(found, key=lambda known: known[0])]
    labels = {candidate.label for candidate in ordered}
    return reports, [candidate for candidate in ordered if _SAME.get(candidate.label) not in labels]


def is_exact(engine: str) -> bool:
    """Return whether an engine has autograd's gradient, to its tolerance if it has one."""
    return bool(engine_class(engine).exact_ones())


def contest(job: Job, model: nn.Module, rows: Sequence[Row], seconds: float) -> Standings:
    """Time autograd and ``rows`` in turns, until the time is over or the maximal number of rounds is reached.

    A row whose first turn is much slower than autograd's has no further turns.

    Args:
        job: the model and its data.
        model: the model to copy.
        rows: the rows to try, the most promising first.
        seconds: the time limit; a step that has begun is finished.

    Raises:
        UsageError: autograd fails.
    """
    end = monotonic() + seconds
    plain = _autograd(job, model)
    usual, standings = plain.turn(job, 0), Standings([plain])
    for candidate in rows:
        # Even on a busy machine, at least one engine is tried.
        late = monotonic() > end - (0.0 if is_exact(candidate.engine) else 0.4 * seconds)
        if late and len(standings.contestants) > 1:
            standings.untried.append(candidate.label)
            continue
        if problems := candidate.create_engine().validate(copy.deepcopy(model), job.chains, batch=job.inputs).problems:
            standings.failures[candidate.label] = "; ".join(problems)
            continue
        with collecting_errors(standings.failures, candidate.label, _describe):
            standings.contestants.append(_tried(candidate, model, plain, job, usual))
    close = [c for c in standings.contestants if c.first_ratio is None]
    _take_turns(close, job, standings, end)
    for contestant in close:
        step = partial(contestant.step, job.batches[0])
        contestant.memory = peak_memory(step, torch.device(job.device))
        contestant.cost = statistics(contestant.times, plain.times)
    return standings


def _autograd(job: Job, model: nn.Module) -> Contestant:
    """Return autograd after a step on each batch, and one more on the first."""
    plain = Contestant.of(BACKPROP, model, job)
    plain.cosine = 1.0
    try:
        losses = [float(plain.step(batch)) for batch in (*job.batches, job.batches[0])]
    except UsageError:
        raise
    except Exception as error:
        hint = _STATE_HINT if "through the graph a second time" in str(error) else ""
        raise UsageError(f"{job.model} cannot be trained on {job.data}: {_describe(error)}{hint}") from error
    if not all(map(isfinite, losses)):
        raise UsageError(
            f"the loss of {job.model} on a batch of {job.data} is not finite, so engines cannot be compared: look for "
            "NaN or infinite numbers in the data."
        )
    return plain


def _tried(candidate: Row, model: nn.Module, plain: Contestant, job: Job, usual: float) -> Contestant:
    """Return a contestant after its first turn and, unless it is too slow, with the cosine of its gradient.

    Short steps are compared with autograd timed at the same moment, long ones with its first time ``usual``, to save
    the budget for the candidates.
    """
    contestant = Contestant.of(candidate, model, job)
    for hopeless in (5 * _HOPELESS, _HOPELESS):
        ratio = mean_seconds(partial(contestant.step, job.batches[0]), 1) / usual
        if ratio > hopeless:
            break
    else:
        if usual < _LONG:
            ratio = median(contestant.turn(job, n) / plain.turn(job, n) for n in range(_WARM_UP))
    if ratio > _MAX_RATIO:
        contestant.first_ratio = ratio
    else:
        # On a copy, since a model may keep activations, with which it could not be copied for the next candidate.
        own, engine = copy.deepcopy(model), candidate.create_engine()
        contestant.cosine = gradient_fidelity(engine, own, job.loss_fn, job.batches[0], job.chains).total.cosine
    return contestant


def _take_turns(close: list[Contestant], job: Job, standings: Standings, end: float) -> None:
    """Time ``close`` in rounds until the time ``end``, with at least ``_FEWEST`` and at most ``_MOST`` rounds."""
    for n in range(_MOST):
        if n >= _FEWEST and monotonic() > end:
            return
        for contestant in list(close):
            label = contestant.row.label
            with collecting_errors(standings.failures, label, _describe):
                contestant.times.append(contestant.turn(job, n))
            if label in standings.failures:
                close.remove(contestant)
                standings.contestants.remove(contestant)


def compiled_cost(job: Job, threads: int, seconds: float) -> dict[str, Any] | str:
    """Return the times of a compiled step and their ratios to an eager step's, or why there are none.

    Args:
        job: the model and its data.
        threads: number of threads of torch.
        seconds: time limit of compiling and timing.
    """
    # Leaving the pool ends its process. Its job is a copy without the cached batches.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            found: dict[str, Any] | str = pool.apply_async(_compiled_times, (replace(job), threads)).get(seconds)
            return found
        except multiprocessing.TimeoutError:
            return f"not compiled within {seconds:.0f} s"


def _compiled_times(job: Job, threads: int) -> dict[str, Any] | str:
    torch.set_num_threads(threads)
    try:
        model = job.build()
        compiled = copy.deepcopy(model)
        compiled.compile()
        steps = [Contestant.of(BACKPROP, model, job).step, Contestant.of(BACKPROP, compiled, job).step]
        for step in steps:
            for _ in range(_WARM_UP):
                step(job.batches[0])
        times = interleaved([partial(mean_seconds, partial(step, job.batches[0])) for step in steps])
    except Exception as error:
        # As text, since not every exception can be sent to another process.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return statistics(times[1], times[0])
