"""A contest and a race as sections of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradfree.benchmarks.advice.compiled import LABEL
from gradfree.benchmarks.advice.contest import Contestant, Standings
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.advice.recommendation import AS_GOOD, Advice
from gradfree.benchmarks.records.records import Record, record_of
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import MEMORY, MIB, STEP, cost_facts, times
from gradfree.wording import count

_BESIDE = {"label": "plain backprop"}
_PLAIN = times(_BESIDE["label"])
_COSINE, _NORM, _NOTE = "cosine", "norm ratio", "note"


def contest_section(job: Job, standings: Standings, compiled: Mapping[str, Any] | str, advice: Advice) -> Section:
    """Return what the contest came to."""
    where: dict[str, Any] = {"task": job.model, "device": job.device, "threads": standings.threads}
    facts = table(
        [
            *(f for c in standings.contestants for f in _told(c, standings, where)),
            *_told_of_compiled(compiled, where),
            *(fact(_NOTE, "", row=label, note=f"failed: {e}", **where) for label, e in standings.failures.items()),
        ]
    )
    return Section(
        title=f"{job.model} on {job.data}: a training step ({job.device}, {count(standings.threads, 'thread')})",
        facts=facts,
        columns=[
            column("step (ms)", STEP, unit="s", factor=1e3),
            Column("step (×)", (Figure(STEP, "{value:.2f}", _PLAIN), Figure(STEP, "{low:.2f}–{high:.2f}", _PLAIN))),
            column("cosine", _COSINE, "{value:.4f}"),
            column("norm ratio", _NORM, "{value:.3f}"),
            column("peak memory (MiB)", MEMORY, "{value:.1f}", "MiB"),
            column("note", _NOTE),
        ],
        legend=(
            "×: of plain backprop's step in the same rounds, median [quartiles]. Cosine and norm ratio: of the whole "
            "gradient beside exact backpropagation's, on one batch, at these weights. "
            + (f"Threads: {standings.why}." if standings.why else "")
        ),
        remarks=[f"No time was left for {', '.join(standings.untried)}."] if standings.untried else [],
        charts=[
            Chart(
                "Step time and gradient",
                points(facts, Figure(STEP, unit=_PLAIN), Figure(_COSINE), "row"),
                Axis(f"{STEP} ({_PLAIN})", "log"),
                Axis("cosine with the exact gradient (1)"),
                band={"as good as exact": (AS_GOOD, 1.0)},
            )
        ],
        answer=advice.words,
    )


def _told(contestant: Contestant, standings: Standings, where: Mapping[str, Any]) -> Iterator[Fact]:
    who = {**contestant.row.named, **where}
    if len(contestant.times) > 1:
        yield from cost_facts(standings.cost(contestant), _BESIDE, **who)
    if contestant.gradient:
        yield fact(_COSINE, "1", contestant.gradient.cosine, **who)
        yield fact(_NORM, "1", contestant.gradient.norm_ratio, **who)
    if contestant.memory is not None:
        yield fact(MEMORY, "MiB", contestant.memory / MIB, **who)
    if contestant.first:
        yield fact(STEP, _PLAIN, contestant.first, **who)
        yield fact(_NOTE, "", note="slow when first tried", **who)


def _told_of_compiled(compiled: Mapping[str, Any] | str, where: Mapping[str, Any]) -> Iterator[Fact]:
    who = {"row": LABEL, "series": LABEL, **where}
    if isinstance(compiled, str):
        yield fact(_NOTE, "", note=compiled, **who)
        return
    yield from cost_facts(compiled, _BESIDE, **who)
    yield fact(_COSINE, "1", 1.0, **who)


def advice_record(job: Job, standings: Standings, compiled: Mapping[str, Any] | str, advice: Advice) -> Record:
    """Return the contest for programs: times in seconds, memory in bytes."""
    rows = [
        {
            "label": c.row.label,
            "engine": c.row.engine,
            "options": dict(c.row.options),
            "cosine": c.gradient and c.gradient.cosine,
            "norm_ratio": c.gradient and c.gradient.norm_ratio,
            "peak_memory": c.memory,
            "first_try": c.first,
            **(standings.cost(c) if len(c.times) > 1 else {}),
        }
        for c in standings.contestants
    ]
    results = {
        "take": advice.engine,
        "advice": advice.words,
        "code": advice.code,
        "threads": standings.threads,
        "rows": rows,
        "torch.compile": compiled if isinstance(compiled, Mapping) else {"note": compiled},
        "failures": standings.failures,
        "untried": standings.untried,
    }
    config = {"model": job.model, "data": job.data, "loss": job.loss, "chains": job.chains}
    return record_of(f"advice/{job.model}/{job.data}/{job.device}", "advice", config, [], results, job.device)
