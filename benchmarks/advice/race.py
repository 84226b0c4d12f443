"""A short training race on a user's own batches: equal time for each, a target that plain backpropagation sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor, nn

from gradfree.benchmarks.advice.contest import Contestant, Say
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.records.case import Row

_LEGS = 20
LEARNING_RATE = 1e-3


@dataclass
class Runner:
    """A row in training.

    Attributes:
        row: the engine.
        losses: mean training loss of each leg.
        seconds: of training behind each leg.
        steps: taken in all.
    """

    row: Row
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: int = 0

    def reached(self, target: float) -> float | None:
        """Return after how many seconds the loss was ``target``; ``None``: never."""
        pairs = zip(self.seconds, self.losses, strict=True)
        return next((seconds for seconds, loss in pairs if loss <= target), None)


def race(job: Job, model: nn.Module, rows: Sequence[Row], seconds: float, say: Say) -> list[Runner]:
    """Train copies of ``model`` by AdamW, each row for an equal share of ``seconds``, in turns, on the same batches.

    Args:
        job: what is trained.
        model: that the copies are of.
        rows: plain backprop first.
        seconds: in all.
        say: is told what is being done.
    """
    runners = [Runner(row) for row in rows]
    lanes = [_lane(Contestant.of(row, model, job, LEARNING_RATE), job) for row in rows]
    leg = seconds / len(rows) / _LEGS
    for n in range(_LEGS):
        for runner, lane in zip(runners, lanes, strict=True):
            say(f"{runner.row.label} in training, leg {n + 1} of {_LEGS}")
            losses: list[Tensor] = []
            start = perf_counter()
            while not losses or perf_counter() - start < leg:
                losses.append(next(lane))
            runner.losses.append(torch.stack(losses).mean().item())
            runner.seconds.append(sum(runner.seconds[-1:]) + perf_counter() - start)
            runner.steps += len(losses)
    return runners


def _lane(contestant: Contestant, job: Job) -> Iterator[Tensor]:
    """Yield the losses of steps on batches that come in the same order for all, at least the first time round."""
    batches = job.stream()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = next(batches)
    yield from map(contestant.step, chain([first], batches))
