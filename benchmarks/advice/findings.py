"""A contest's results as a section of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gradfree.benchmarks.advice.compiled import LABEL
from gradfree.benchmarks.advice.contest import Contestant, Standings
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.advice.recommendation import Advice
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import MEMORY, MIB, STEP, cost_facts, times
from gradfree.wording import count

_BESIDE = {"label": "autograd"}
_PLAIN = times(_BESIDE["label"])
_COSINE, _NOTE = "cosine", "note"


def contest_section(
    job: Job, standings: Standings, compiled: Mapping[str, Any] | str, advice: Advice, budget: float
) -> Section:
    """Return the section on the contest."""
    where: dict[str, Any] = {"task": job.model, "device": job.device, "threads": torch.get_num_threads()}
    facts = table(
        [
            *(f for c in standings.contestants for f in _facts_of(c, standings, where)),
            *_compiled_facts(compiled, where),
            *(fact(_NOTE, "", note=f"{label} failed: {error}", **where) for label, error in standings.failures.items()),
        ]
    )
    where_and_how_long = f"{job.device}, {count(torch.get_num_threads(), 'thread')}, {budget:g} s"
    return Section(
        title=f"A training step of {job.model} on {job.data}: batch {job.shapes}; {where_and_how_long}",
        facts=facts,
        columns=[
            column("ms", STEP, "{value:.1f}", "s", factor=1e3),
            column("×", STEP, unit=_PLAIN),
            column("quartiles", STEP, "{low:.2f}–{high:.2f}", _PLAIN),
            column("cosine", _COSINE, "{value:.4f}"),
            column("peak MiB", MEMORY, "{value:.1f}", "MiB"),
        ],
        legend=(
            "×: as a multiple of autograd's step in the same rounds, median. Cosine: of the whole gradient with the "
            "exact one, on one batch, at the current weights."
        ),
        remarks=list(_notes(standings, compiled)),
        answer=advice.words,
    )


def _notes(standings: Standings, compiled: Mapping[str, Any] | str) -> Iterator[str]:
    """Yield sentences on rows that the table does not show."""
    if slow := [f"{c.row.name} ({c.first_ratio:.1f}×)" for c in standings.contestants if c.first_ratio]:
        yield f"Too slow in the first turn to be timed further: {', '.join(slow)}."
    if isinstance(compiled, str):
        yield f"{LABEL}: {compiled}."
    for label, error in standings.failures.items():
        yield f"{label} failed: {error}."
    if standings.untried:
        yield f"No time was left for {', '.join(standings.untried)}."


def _facts_of(contestant: Contestant, standings: Standings, where: Mapping[str, Any]) -> Iterator[Fact]:
    who = {**contestant.row.fact_columns, **where}
    if len(contestant.times) > 1:
        yield from cost_facts(standings.cost(contestant), _BESIDE, **who)
    if contestant.gradient:
        yield fact(_COSINE, "1", contestant.gradient.cosine, **who)
    if contestant.memory is not None:
        yield fact(MEMORY, "MiB", contestant.memory / MIB, **who)
    if contestant.first_ratio:
        yield fact(STEP, _PLAIN, contestant.first_ratio, **who)


def _compiled_facts(compiled: Mapping[str, Any] | str, where: Mapping[str, Any]) -> Iterator[Fact]:
    who = {"row": LABEL, "series": LABEL, **where}
    if isinstance(compiled, str):
        return
    yield from cost_facts(compiled, _BESIDE, **who)
    yield fact(_COSINE, "1", 1.0, **who)
