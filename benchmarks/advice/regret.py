"""How good advice is: what it recommends beside the fastest of all that might have been, on models of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import ceil
from time import monotonic
from typing import Any, ClassVar

import polars as pl
import torch
from torch import Tensor, nn

from gradfree import CellLayer, ChainError, create_model, gradient_fidelity
from gradfree.benchmarks.advice.contest import Budget, Contestant, contest, rows_to_try
from gradfree.benchmarks.advice.job import Batch, Job
from gradfree.benchmarks.advice.recommendation import AS_GOOD, advise
from gradfree.benchmarks.data.synthetic import random_examples
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.sweeps.sweep import row
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimates, fact
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import Timings, clocked, in_turns, statistics, times

_FEATURES, _CLASSES = 16, 4
_BATCHES = 2
_ROUNDS = 9
_TURN = 0.03
"""Seconds of steps in a turn, if a step takes less."""
_HOPELESS = 2.0
"""Times what the fastest takes, at the second step: no further turns."""
_MORE: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "backprop": ({"plain": False},),
    "dsf": ({"feedback": "gate", "iterations": 1},),
    "fixed_point": ({"iterations": 3}, {"iterations": 6}),
    "highway_bp": ({"iterations": 3}, {"iterations": 6}),
    "shooting": tuple({"segments": count} for count in (8, 32, 128)),
    "truncated": ({"window": 4}, {"window": 16}, {"window": 32}),
}
"""Options that advice does not try."""
_TAKEN, _BEST, _REGRET, _SPENT = "what is advised", "what is fastest", "regret", "time of advice"
_WITHIN = 10.0


class Last(nn.Module):
    """A recurrent layer, and a linear one on its last output.

    Args:
        layer: batch first.
        outputs: of ``layer``.
    """

    def __init__(self, layer: nn.Module, outputs: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(outputs, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, 4) for ``x``, (B, T, 16)."""
        logits: Tensor = self.head(self.layer(x)[0][:, -1])
        return logits


@dataclass(frozen=True)
class Known:
    """A model, and what a batch of its examples is.

    Attributes:
        build: returns the model.
        shape: of the inputs.
        tokens: of how many kinds inputs and targets are, which are one a step then; 0: numbers, and a class each.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0


def _recurrent(layer: Callable[..., nn.Module], units: int, batch: int, steps: int, **options: int) -> Known:
    def build() -> nn.Module:
        return Last(layer(_FEATURES, units, batch_first=True, **options), units * (1 + options.get("bidirectional", 0)))

    return Known(build, (batch, steps, _FEATURES))


def _cell_layer(features: int, units: int, batch_first: bool) -> nn.Module:
    return CellLayer(nn.GRUCell(features, units), batch_first=batch_first)


def _dense(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


def _of_ours(model: str, *shape: int, tokens: int = 0, **options: object) -> Known:
    return Known(partial(create_model, model, **options), shape, tokens)


KNOWN: Mapping[str, Known] = {
    "GRU, 1 sequence of 2,048": _recurrent(nn.GRU, 64, 1, 2048),
    "GRU, 32 of 64": _recurrent(nn.GRU, 64, 32, 64),
    "GRU of 2 layers, 8 of 128": _recurrent(nn.GRU, 64, 8, 128, num_layers=2),
    "GRU in both directions, 8 of 128": _recurrent(nn.GRU, 64, 8, 128, bidirectional=True),
    "LSTM, 1 sequence of 2,048": _recurrent(nn.LSTM, 128, 1, 2048),
    "LSTM, 32 of 64": _recurrent(nn.LSTM, 64, 32, 64),
    "RNN, 1 sequence of 2,048": _recurrent(nn.RNN, 64, 1, 2048),
    "cell in a loop, 8 of 64": _recurrent(_cell_layer, 32, 8, 64),
    "character GRU, 16 of 128": _of_ours("recurrent_lm", 16, 128, tokens=128, vocab_size=128, cell="gru", width=128),
    "GPT of 4 layers": _of_ours("gpt", 16, 48, tokens=127, vocab_size=127, context=48, layers=4, width=48, heads=4),
    "ResNet of 14 layers": _of_ours("preact_resnet", 16, 1, 8, 8, depth=14, in_channels=1, num_classes=_CLASSES),
    "residual MLP of 64 blocks": _of_ours(
        "residual_mlp", 32, _FEATURES, in_features=_FEATURES, num_classes=_CLASSES, depth=64, width=32
    ),
    "64 dense layers": Known(partial(_dense, 64, 16), (32, 16)),
    "orthogonal MLP of 20 layers": _of_ours(
        "orthogonal_mlp", 64, _FEATURES, in_features=_FEATURES, num_classes=_CLASSES, depth=20
    ),
}
"""By what they are for people."""


@dataclass(frozen=True)
class KnownJob(Job):
    """One of :data:`KNOWN`, by its name, on random examples."""

    def build(self) -> nn.Module:
        """Return a new model in training mode."""
        return KNOWN[self.model].build().to(self.device).train()

    def once(self) -> Iterator[Batch]:
        """Yield the batches."""
        known = KNOWN[self.model]
        for _ in range(_BATCHES):
            yield [
                x.to(self.device) for x in random_examples(known.shape, known.tokens or _CLASSES, bool(known.tokens))
            ]


@dataclass(frozen=True, kw_only=True)
class AdviceCheck(Case):
    """The advice on a model within a budget, then turns of whatever has backpropagation's gradient, until they stand.

    Attributes:
        model: one of :data:`~gradfree.benchmarks.advice.regret.KNOWN`.
        budget: of the advice, in seconds.
        threads: for torch to use.
    """

    kind: ClassVar[str] = "regret"
    topic_field: ClassVar[str] = "model"
    model: str
    budget: float
    threads: int

    @property
    def subject(self) -> str:
        """What is compared."""
        return f"advice within {self.budget:g} s"

    def run(self) -> dict[str, Any]:
        """Return what is advised, why, what it took, and what a step takes with each candidate."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(self.seed)
        job = KnownJob(self.model, "random examples", None, None, self.device)
        net = job.build()
        _, rows = rows_to_try(net, None)
        start = monotonic()
        standings = contest(job, net, rows, Budget(self.budget), lambda what: None)
        spent, advice = monotonic() - start, advise(standings, "not compiled", None)
        taken = advice.engine or BACKPROP.label
        told = {"taken": taken, "words": advice.words, "spent": spent, "untried": standings.untried}
        return {**told, "rows": _timed(_candidates(rows, net, job), taken, job)}


def _candidates(rows: Sequence[Row], net: nn.Module, job: KnownJob) -> Iterator[Contestant]:
    """Yield whatever has backpropagation's gradient: plain, and with every engine and setting."""
    yield Contestant.of(BACKPROP, net, job)
    known = {candidate.engine for candidate in rows}
    more = (row(engine, options) for engine, settings in _MORE.items() if engine in known for options in settings)
    for candidate in chain(rows, more):
        # What refuses such a model or batch is none.
        with suppress(ChainError):
            found = gradient_fidelity(candidate.create_engine(), net, job.loss_fn, job.batches[0])
            if found.total.cosine >= AS_GOOD:
                yield Contestant.of(candidate, net, job)


def _timed(candidates: Iterator[Contestant], taken: str, job: KnownJob) -> list[dict[str, Any]]:
    """Return times and ratios to plain backpropagation's of that, of what was taken, and of all that are in sight."""
    first = {}
    for candidate in candidates:
        step = partial(candidate.step, job.batches[0])
        step()
        first[candidate.row.label] = step, clocked(step, 1)
    fastest = min(seconds for _, seconds in first.values())
    steps = {
        label: partial(clocked, step, max(1, ceil(_TURN / seconds)))
        for label, (step, seconds) in first.items()
        if seconds < _HOPELESS * fastest or label in (BACKPROP.label, taken)
    }
    turns = dict(zip(steps, in_turns(list(steps.values()), _ROUNDS), strict=True))
    baseline = turns[BACKPROP.label]
    return [{"label": label, **statistics(own, baseline)} for label, own in turns.items()]


@dataclass(frozen=True)
class Regrets(Timings[str]):
    """Advice on some models.

    Attributes:
        budget: of each advice, in seconds.
    """

    budget: float = 20.0

    def case(self, model: str, /, **where: Any) -> AdviceCheck:
        """Return the case of a model."""
        del where["rows"]  # Which ones there are, advice finds out.
        return AdviceCheck(model=model, budget=self.budget, **where)

    def told(self, case: Case, record: Record) -> Iterator[Fact]:
        """Yield what each candidate costs, and how much more what is advised does than the fastest."""
        yield from super().told(case, record)
        results = record["results"]
        if not results:
            return
        costs = {cost["label"]: cost for cost in results["rows"]}
        best = min(costs, key=lambda label: costs[label]["ratio"])
        taken, unit = results["taken"], times(BACKPROP.label)
        for metric, label in ((_TAKEN, taken), (_BEST, best)):
            yield fact(metric, "", note=label)
            if label in costs:
                yield fact(metric, unit, Estimate.recorded(costs[label], "ratio"))
        if taken in costs:
            longer = statistics(costs[taken]["times"], costs[best]["times"])
            ends = (longer["ratio"], *longer["ratio_quartiles"])
            yield fact(_REGRET, "%", Estimate(*(100 * (ratio - 1) for ratio in ends)))
        yield fact(_SPENT, "s", results["spent"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of what is advised and what is fastest, a row a model."""
        unit = times(BACKPROP.label)
        regrets = estimates(facts, by="setting", metric=_REGRET)
        much = [f"{model} ({regret.value:.0f} %)" for model, regret in regrets.items() if regret.value > _WITHIN]
        within = f"Within {_WITHIN:.0f} % of the fastest on {len(regrets) - len(much)} of {len(regrets)} models"
        return Section(
            title=f"advice and the fastest, device: {facts['device'][0]}, threads: {self.threads}",
            facts=facts,
            names={"model": "setting"},
            columns=[
                Column("advised", (Figure(_TAKEN, unit=""),)),
                column("advised (×)", _TAKEN, unit=unit),
                Column("fastest", (Figure(_BEST, unit=""),)),
                column("fastest (×)", _BEST, unit=unit),
                Column("regret (%)", (Figure(_REGRET, "{value:.0f}"), Figure(_REGRET, "{low:.0f}–{high:.0f}"))),
                column("advice took (s)", _SPENT, "{value:.0f}"),
            ],
            setup="Models in training by AdamW on random examples.",
            legend=f"Advised: within {self.budget:g} s, torch.compile aside. Fastest: of every setting that advice "
            f"tries, and of {sum(map(len, _MORE.values()))} more, those whose gradient has a cosine of {AS_GOOD} or "
            f"more, in turns, {_ROUNDS} rounds. ×: median of a step's time as a multiple of plain "
            "backprop's; regret: how much longer a step takes as advised than with the fastest, round by round, "
            "median [quartiles].",
            remarks=[f"{within}, not on {', '.join(much)}." if much else f"{within}.", *self.failures(facts)],
        )


def suite() -> Suite:
    """Return the check of advice on all models that there are."""
    return (Regrets(tuple(KNOWN), threads=1),)
