"""What a contest found: the recommendation, and the section of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from typing import Any, NamedTuple

import torch

from gradfree.benchmarks.advice.contest import COMPILED, Contestant, Standings
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.advice.order import is_exact
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import MEMORY, MIB, STEP, cost_facts, statistics, times
from gradfree.wording import count

AS_GOOD = 0.99
"""Minimal cosine of a gradient that is recommended."""
_DIGITS = 4
"""Decimals of a cosine."""
_AS_FAST = 1.05
"""Maximal time, relative to the fastest row's, of a row that is preferred for its more exact gradient."""
_BESIDE = {"label": "autograd"}
_PLAIN = times(_BESIDE["label"])
_COSINE = "cosine"


class Advice(NamedTuple):
    """A recommendation with its figures, and code to paste."""

    words: str
    code: str


def advise(standings: Standings, chains: Sequence[str] | None) -> Advice:
    """Return the recommendation: the fastest engine that is significantly faster and has autograd's gradient, if any.

    If several are equally fast by their quartiles, and within 5 % of the fastest, it is the one with the most exact
    gradient. If torch.compile is faster than all, it is recommended.
    """
    faster = [c for c in standings.contestants[1:] if c.cost and _quartiles(c.cost)[1] < 1]
    as_good = [c for c in faster if c.cosine >= AS_GOOD]
    best, compiled = _best(as_good) if as_good else None, standings.compiled
    hints = _hints(faster, best)
    if not isinstance(compiled, str) and _quartiles(compiled)[1] < _least(best):
        words = f"Stay with autograd, and compile: a step is then {_faster(compiled)}"
        if best:
            words += f"; with {best.row.label} it is {_faster(best.cost)}"
        return Advice(f"{words}.{hints}", "model.compile()")
    if best is None and standings.untried:
        timed = len(standings.contestants) - 1
        every = timed + len(standings.failures) + len(standings.untried)
        words = f"Stay with autograd for now: {timed} of {every} settings were timed"
        words += ", none of them faster with autograd's gradient" if timed else ""
        return Advice(f"{words}. Give a longer --budget.{hints}", "")
    if len(standings.contestants) == 1:
        return Advice(f"Stay with autograd: no engine could be timed.{hints}", "")
    if best is None:
        return Advice(f"Stay with autograd: no engine with its gradient is faster here.{hints}", "")
    words = (
        f"Take {best.row.label}: a step is {_faster(best.cost)} than with autograd, and the gradient is equal or "
        f"nearly equal (cosine {best.cosine:.{_DIGITS}f})."
    )
    options = {**best.row.options, **({"chains": list(chains)} if chains else {})}
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    code = f"optimizer = gradfree.EngineOptimizer(optimizer, model, engine={best.row.engine!r}{given})"
    return Advice(words + hints, code)


def _best(as_good: Sequence[Contestant]) -> Contestant:
    """Return the fastest contestant, or a more exact one that is as fast when compared with it round by round.

    Approximate engines count only if one of them is faster than the fastest exact engine beyond the quartiles.
    """
    fastest = min(as_good, key=_ratio)
    if exact := [c for c in as_good if is_exact(c.row.engine)]:
        quickest = min(exact, key=_ratio)
        if _quartiles(statistics(quickest.times, fastest.times))[0] <= 1:
            as_good, fastest = exact, quickest
    beside = {c.row.label: statistics(c.times, fastest.times) for c in as_good}
    near = {label for label, b in beside.items() if b["ratio"] <= _AS_FAST and _quartiles(b)[0] <= 1}
    rivals = [c for c in as_good if c.row.label in near]
    # Of equal cosines, prefer smaller tolerances.
    return max(rivals, key=lambda c: (round(c.cosine, _DIGITS), -_tolerance(c), -beside[c.row.label]["ratio"]))


def _hints(faster: Sequence[Contestant], best: Contestant | None) -> str:
    """Return hints on further options: exact gradients, and faster but less exact ones."""
    words = ""
    # An exact engine has autograd's gradient in every model.
    exact = [c for c in faster if is_exact(c.row.engine) and not _tolerance(c)]
    if best and exact and best not in exact:
        quickest = min(exact, key=_ratio)
        words += f" With exactly autograd's gradient: {quickest.row.label} ({_faster(quickest.cost)})."
    rough = [c for c in faster if c.cosine < AS_GOOD and _quartiles(c.cost)[1] < _least(best)]
    if rough:
        nearest = max(rough, key=lambda c: c.cosine)
        words += (
            f" {nearest.row.label} is {_faster(nearest.cost)}, but its gradient is only approximate (cosine "
            f"{nearest.cosine:.{_DIGITS}f}): see how it trains by gradfree bench run."
        )
    return words


def _tolerance(contestant: Contestant) -> float:
    """Return the tolerance to which the engine solves chains in float32; 0 if it is exact."""
    return contestant.row.create_engine().outputs_within(torch.float32)


def _ratio(contestant: Contestant) -> float:
    return float(contestant.cost["ratio"])


def _quartiles(cost: Mapping[str, Any]) -> tuple[float, float]:
    low, high = cost["ratio_quartiles"]
    return low, high


def _least(best: Contestant | None) -> float:
    """Return the ratio that a faster step must be below."""
    return _quartiles(best.cost)[0] if best else 1.0


def _faster(cost: Mapping[str, Any]) -> str:
    return f"{1 / cost['ratio']:.2f}× faster"


def contest_section(job: Job, standings: Standings, answer: str, budget: float) -> Section:
    """Return the section on the contest."""
    threads = torch.get_num_threads()
    where = {"task": job.model, "device": job.device, "threads": threads}
    budget_and_device = f"{job.device}, {count(threads, 'thread')}, {budget:.3g} s"
    return Section(
        title=f"A training step of {job.model} on {job.data}: batch {job.shapes}; {budget_and_device}",
        facts=table(one | where for one in _facts(standings)),
        columns=[
            column("ms", STEP, "{value:.1f}", "s", factor=1e3),
            column("×", STEP, unit=_PLAIN),
            column("quartiles", STEP, "{low:.2f}–{high:.2f}", _PLAIN),
            column("cosine", _COSINE, "{value:.4f}"),
            column("peak MiB", MEMORY, "{value:.1f}", "MiB"),
        ],
        legend=(
            "×: as a multiple of autograd's step in the same rounds, median. Cosine: of the whole gradient with the "
            "exact one, on one batch, at the current weights. Without quartiles: too slow in the first turn to be "
            "timed further, or stopped in it."
        ),
        remarks=list(_notes(standings)),
        answer=answer,
    )


def _notes(standings: Standings) -> Iterator[str]:
    """Yield sentences on rows that the table does not show."""
    if isinstance(standings.compiled, str):
        yield f"{COMPILED}: {standings.compiled}."
    for contestant in standings.contestants:
        yield from (f"{contestant.row.label}: {note}" for note in contestant.notes)
    for label, error in standings.failures.items():
        yield f"{label} failed: {error.rstrip('.')}."
    if standings.untried:
        yield f"No time was left for {', '.join(standings.untried)}: give a longer --budget."


def _facts(standings: Standings) -> Iterator[Fact]:
    for contestant in standings.contestants:
        who: Mapping[str, Any] = contestant.row.fact_columns
        yield from cost_facts(contestant.cost, _BESIDE, **who)
        if not isnan(contestant.cosine):
            yield fact(_COSINE, "1", contestant.cosine, **who)
        if contestant.memory is not None:
            yield fact(MEMORY, "MiB", contestant.memory / MIB, **who)
        if contestant.first_ratio:
            yield fact(STEP, _PLAIN, contestant.first_ratio, **who)
    if not isinstance(standings.compiled, str):
        who = {"row": COMPILED, "series": COMPILED}
        yield from cost_facts(standings.compiled, _BESIDE, **who)
        yield fact(_COSINE, "1", 1.0, **who)
