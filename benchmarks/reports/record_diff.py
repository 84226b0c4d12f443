"""Two sets of records side by side, of two commits or machines: what changed from "before" to "after"."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl

from gradfree.benchmarks.records.provenance import Provenance, described
from gradfree.benchmarks.records.records import Record, RecordFile, error_of
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimate_of, fact, select, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tables.verdict import shift
from gradfree.benchmarks.training.outcomes import score_in
from gradfree.cli import UsageError

Runs = dict[int, Record]
"""Records that differ in nothing but the seed, by it."""
Group = dict[str, Runs]
"""Those of both sets, by :data:`SETS`."""

UNMATCHED = "not in both"
SETS = BEFORE, AFTER = "before", "after"
_TIME, _MEMORY = "time", "peak memory"
_CASE = {"case": "task", "engine": "row"}
_NOTED = 0.01
"""Share by which memory may differ unmentioned."""


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, or of a folder that ``gradfree bench run`` has filled.

    Raises:
        UsageError: there are none.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}: name folders of `gradfree bench run`, or files of records.")
    records = list(RecordFile(path / "records.jsonl" if path.is_dir() else path).read().values())
    if not records:
        raise UsageError(f"{path} has no records; `gradfree bench run --out {path}` makes them.")
    return records


def compare(before: Sequence[Record], after: Sequence[Record]) -> list[Section]:
    """Return what records with the same configuration tell, and which one set lacks."""
    groups = list(_groups(before, after))
    scores, times = (table(fact for group in groups for fact in told(group)) for told in (_score_facts, _time_facts))
    sections = [
        *(_score_section(found) for _, found in scores.group_by("source", "device", maintain_order=True)),
        *(_time_section(found) for _, found in times.group_by("device", maintain_order=True)),
    ]
    unmatched = [group for group in groups if _finished(group[BEFORE]).keys() != _finished(group[AFTER]).keys()]
    return [*sections, _unmatched_section(unmatched)] if unmatched else sections


def environment_changes(before: Sequence[Record], after: Sequence[Record]) -> Iterator[str]:
    """Yield in what the environments of the sets differ, and where one mixes several."""
    sets = {BEFORE: before, AFTER: after}
    for name, records in sets.items():
        for warning in Provenance(records).warnings():
            yield f"{name}: {warning}"
    environments = {name: [described(record) for record in records] for name, records in sets.items()}
    for field in dict.fromkeys(field for found in environments.values() for e in found for field in e):
        old, new = (
            ", ".join(dict.fromkeys(e.get(field, "unknown") for e in environments[name])) for name in (BEFORE, AFTER)
        )
        if old != new:
            yield f"The environments differ, {field}: {old} {BEFORE}; {new} {AFTER}."


def _score_facts(group: Group) -> Iterator[Fact]:
    """Yield the test scores of both sets and their difference, from the seeds that both have."""
    scores = {
        name: {s: score_in(r["results"], "test") for s, r in _finished(runs).items() if "test" in r["results"]}
        for name, runs in group.items()
    }
    common = sorted(scores[BEFORE].keys() & scores[AFTER].keys())
    if not common:
        return
    record = group[BEFORE][common[0]]
    score, (task, row) = record["config"]["task"]["score"], _names(record)
    metric = f"test {score['name']} ({score['unit']})"
    who = {"task": task, "row": row, "device": record["config"]["device"], "source": metric}
    for name in SETS:
        yield fact("score", score["unit"], Estimate.of([scores[name][s] for s in common]), setting=name, **who)
    change = Estimate.of_differences([scores[AFTER][s] - scores[BEFORE][s] for s in common])
    yield fact("difference", score["unit"], change, setting=AFTER, **who)


def _time_facts(group: Group) -> Iterator[Fact]:
    """Yield time and memory of each row in both sets, for each seed, and the ratio."""
    old, new = (_finished(group[name]) for name in SETS)
    for seed in sorted(old.keys() & new.keys()):
        task, what = _names(old[seed])
        where = {"task": task + what.removeprefix("all rows"), "device": old[seed]["config"]["device"]}
        rows, others = ({row["label"]: row for row in r[seed]["results"].get("rows", [])} for r in (old, new))
        for label, row in rows.items():
            other = others.get(label, {})
            if "time" in row and "time" in other:
                who, times = {"row": label, **where}, [Estimate.recorded(r, "time") for r in (row, other)]
                memory = other.get("peak_memory", 1) / row.get("peak_memory", 1)
                yield fact(_TIME, "s", times[0], setting=BEFORE, **who)
                yield fact(_TIME, "s", times[1], setting=AFTER, **who)
                yield fact(_TIME, "×", times[1] / times[0], setting=AFTER, **who)
                yield fact(_MEMORY, "×", memory, setting=AFTER, **who)


def _score_section(facts: pl.DataFrame) -> Section:
    """Return the section on test scores."""
    title = f"{facts['source'][0]}, device: {facts['device'][0]}"
    facts = facts.with_columns(source=pl.lit(None, pl.String))
    found = _told(facts, "difference")
    listed = {words: [row for row, d in found.items() if shift(d) == words] for words in ("higher", "lower")}
    same = sum(d.value == d.margin == 0 for d in found.values())
    return Section(
        title=title,
        facts=facts,
        columns=[
            Column("seeds", (Figure("score", "{n}"),), {"setting": BEFORE}),
            *(column(name, "score", setting=name) for name in SETS),
            column("difference", "difference", "{value:+.2f} ± {margin:.2f}", setting=AFTER),
        ],
        legend="Difference: mean of the differences, seed by seed, ± its 95 % confidence interval (Student's t).",
        names=_CASE,
        remarks=[
            *(f"{words.capitalize()} {AFTER}: {', '.join(rows)}." for words, rows in listed.items() if rows),
            f"Exactly the same with every seed: {same} of {len(found)}.",
        ],
    )


def _time_section(facts: pl.DataFrame) -> Section:
    """Return the section on times."""
    ratios, memory = _told(facts, _TIME, unit="×"), _told(facts, _MEMORY)
    found = {
        "Faster": [row for row, ratio in ratios.items() if ratio.high < 1],
        "Slower": [row for row, ratio in ratios.items() if ratio.low > 1],
    }
    remarks = [
        f"{words} {AFTER}, beyond the quartiles, in {len(rows)} of {len(ratios)} rows: {', '.join(rows)}."
        for words, rows in found.items()
        if rows
    ]
    if changed := [f"{row} ({ratio.value:.2f}×)" for row, ratio in memory.items() if abs(ratio.value - 1) > _NOTED]:
        remarks.append(f"Peak memory {AFTER}, as a multiple of that {BEFORE}, where it differs: {', '.join(changed)}.")
    return Section(
        title=f"times, device: {facts['device'][0]}",
        facts=facts,
        columns=[
            *(column(f"{name} (ms)", _TIME, "{value:#.3g}", "s", setting=name, factor=1e3) for name in SETS),
            column("ratio", _TIME, unit="×", setting=AFTER),
            column("range", _TIME, "{low:.2f}–{high:.2f}", "×", setting=AFTER),
        ],
        legend=(
            "Medians of a run's rounds. Ratio: below 1, it is faster after. Range: from its lower quartile over the "
            "upper one before to its upper over the lower before. Rounds of one run are closer to each other than runs."
        ),
        names=_CASE,
        remarks=remarks,
    )


def _unmatched_section(groups: Sequence[Group]) -> Section:
    """Return the section on cases that the sets do not have for the same seeds."""
    facts: list[Fact] = []
    for group in groups:
        record = next(record for runs in group.values() for record in runs.values())
        who = {"task": " ".join(_names(record)), "row": f"{record['kind']}, {record['config']['device']}"}
        facts += [fact(name, "seeds", len(_finished(runs)), note=_count(runs), **who) for name, runs in group.items()]
    return Section(
        title=UNMATCHED,
        facts=table(facts),
        columns=[column(name, name, "{note}") for name in SETS],
        legend="Number of seeds that have results. The same case has the same configuration to the last option.",
        names={"case": "task", "kind and device": "row"},
    )


def _told(facts: pl.DataFrame, metric: str, **where: str) -> dict[str, Estimate]:
    """Return what is known of a metric by case and engine, in words."""
    found = select(facts, metric=metric, setting=AFTER, **where)
    return {f"{row['task']} {row['row']}": estimate_of(row) for row in found.iter_rows(named=True)}


def _groups(before: Sequence[Record], after: Sequence[Record]) -> Iterator[Group]:
    """Yield the records of each configuration, those before first."""
    groups: dict[tuple[str, str], Group] = defaultdict(lambda: {name: {} for name in SETS})
    for name, records in ((BEFORE, before), (AFTER, after)):
        for record in records:
            key = record["kind"], json.dumps(record["config"], sort_keys=True)
            groups[key][name][record["seeds"][0]] = record
    yield from groups.values()


def _finished(runs: Mapping[int, Record]) -> Runs:
    return {seed: record for seed, record in runs.items() if not error_of(record)}


def _count(runs: Runs) -> str:
    finished = len(_finished(runs))
    return f"{finished}, {len(runs) - finished} failed" if finished < len(runs) else f"{finished}"


def _names(record: Record) -> tuple[str, str]:
    """Return a case's topic and subject, as in its id."""
    _, topic, *subject, _device, _seed, _digest = record["case"].split("/")
    return topic, "/".join(subject)
