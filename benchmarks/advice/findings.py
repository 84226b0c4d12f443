"""A contest's results as a section of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from typing import Any

import torch

from gradfree.benchmarks.advice.compiled import LABEL
from gradfree.benchmarks.advice.contest import Standings
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import MEMORY, MIB, STEP, cost_facts, times
from gradfree.wording import count

_BESIDE = {"label": "autograd"}
_PLAIN = times(_BESIDE["label"])
_COSINE, _NOTE = "cosine", "note"


def contest_section(job: Job, standings: Standings, answer: str, budget: float) -> Section:
    """Return the section on the contest."""
    threads = torch.get_num_threads()
    where = {"task": job.model, "device": job.device, "threads": threads}
    budget_and_device = f"{job.device}, {count(threads, 'thread')}, {budget:g} s"
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
            "timed further."
        ),
        remarks=list(_notes(standings)),
        answer=answer,
    )


def _notes(standings: Standings) -> Iterator[str]:
    """Yield sentences on rows that the table does not show."""
    if isinstance(standings.compiled, str):
        yield f"{LABEL}: {standings.compiled}."
    for label, error in standings.failures.items():
        yield f"{label} failed: {error}."
    if standings.untried:
        yield f"No time was left for {', '.join(standings.untried)}."


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
        who = {"row": LABEL, "series": LABEL}
        yield from cost_facts(standings.compiled, _BESIDE, **who)
        yield fact(_COSINE, "1", 1.0, **who)
    for label, error in standings.failures.items():
        yield fact(_NOTE, "", note=f"{label} failed: {error}")
