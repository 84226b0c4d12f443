"""Two sets of records side by side: of two commits, or of two machines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl

from gradfree.benchmarks.records.provenance import Provenance, described
from gradfree.benchmarks.records.records import Record, RecordFile, error_of
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.estimates import Estimate
from gradfree.benchmarks.tables.facts import Fact, estimate_of, fact, select, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tables.verdict import shift
from gradfree.benchmarks.training.training import score_in
from gradfree.cli import UsageError

Runs = Mapping[int, Record]
"""Records that differ in nothing but the seed, by it."""
Pair = tuple[Runs, Runs]
"""Those of both sets."""

UNMATCHED = "not in both"
_DIFFERENCE, _RATIO, _MEMORY = "b − a", "b / a", "peak memory, b / a"
_CASE = {"case": "task", "engine": "row"}
_NOTED = 0.01
"""Share by which memory may differ unmentioned."""


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, or of a folder that ``gradfree bench run`` has filled.

    Raises:
        UsageError: there are none.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}.")
    records = list(RecordFile(path / "records.jsonl" if path.is_dir() else path).read().values())
    if not records:
        raise UsageError(f"{path} has no records; `gradfree bench run --out {path}` makes them.")
    return records


def compare(a: Sequence[Record], b: Sequence[Record]) -> list[Section]:
    """Return what the records of both sets with the same configuration tell, and which have no match."""
    pairs = list(_pairs(a, b))
    scores, times = (table(fact for pair in pairs for fact in told(pair)) for told in (_score_facts, _time_facts))
    groups = (
        *(_score_section(found) for _, found in scores.group_by("setting", maintain_order=True)),
        *(_time_section(found) for _, found in times.group_by("device", maintain_order=True)),
    )
    unmatched = [pair for pair in pairs if _finished(pair[0]).keys() != _finished(pair[1]).keys()]
    return [*groups, _unmatched_section(unmatched)] if unmatched else list(groups)


def environment_changes(a: Sequence[Record], b: Sequence[Record]) -> Iterator[str]:
    """Yield in what the environments of both sets differ, and where either set mixes several."""
    for name, records in (("a", a), ("b", b)):
        for warning in Provenance(records).warnings():
            yield f"{name}: {warning}"
    before, after = ([described(record) for record in records] for records in (a, b))
    for field in dict.fromkeys(field for environment in (*before, *after) for field in environment):
        values = [
            ", ".join(dict.fromkeys(e.get(field, "unknown") for e in environments)) for environments in (before, after)
        ]
        if values[0] != values[1]:
            yield f"a and b differ, {field}: {values[0]} in a; {values[1]} in b."


def _score_facts(pair: Pair) -> Iterator[Fact]:
    """Yield the test scores of both sets and their difference, from the seeds that both have."""
    a, b = (
        {s: score_in(r["results"], "test") for s, r in _finished(runs).items() if "test" in r["results"]}
        for runs in pair
    )
    common = [seed for seed in b if seed in a]
    if not common:
        return
    record = pair[0][min(common)]
    score, device, (task, row) = record["config"]["task"]["score"], record["config"]["device"], _names(record)
    setting = f"test {score['name']} ({score['unit']}), device: {device}"
    who = {"task": task, "row": row, "device": device, "setting": setting}
    for metric, scores in (("a", a), ("b", b)):
        yield fact(metric, score["unit"], Estimate.of([scores[seed] for seed in common]), **who)
    difference = Estimate.of_differences([b[seed] - a[seed] for seed in common])
    yield fact(_DIFFERENCE, score["unit"], difference, **who)


def _score_section(facts: pl.DataFrame) -> Section:
    """Return the section on test scores of both sets."""
    found = _told(facts, _DIFFERENCE)
    same = [d for d in found.values() if d.value == d.margin == 0]
    listed = {words: [name for name, d in found.items() if shift(d) == words] for words in ("higher", "lower")}
    return Section(
        title=facts["setting"][0],
        facts=facts,
        columns=[
            column("seeds", _DIFFERENCE, "{n}"),
            *(column(name, name) for name in "ab"),
            column("b − a", _DIFFERENCE, "{value:+.2f} ± {margin:.2f}"),
        ],
        legend="b − a: mean of the differences, seed by seed, ± its 95 % confidence interval (Student's t).",
        names=_CASE,
        remarks=[
            *(f"{words.capitalize()} in b: {', '.join(names)}." for words, names in listed.items() if names),
            f"Exactly the same with every seed: {len(same)} of {len(found)}.",
        ],
    )


def _time_facts(pair: Pair) -> Iterator[Fact]:
    """Yield time and memory of each row in both sets, for each seed that both have."""
    a, b = map(_finished, pair)
    for seed in sorted(a.keys() & b.keys()):
        task, manner = _names(a[seed])
        where = {"task": task + manner.removeprefix("all rows"), "device": a[seed]["config"]["device"]}
        ours, other = ({row["label"]: row for row in runs[seed]["results"].get("rows", [])} for runs in (a, b))
        for label in ours:
            if label in other and "time" in ours[label] and "time" in other[label]:
                before, after = (Estimate.recorded(rows[label], "time") for rows in (ours, other))
                yield fact("a", "s", before, row=label, **where)
                yield fact("b", "s", after, row=label, **where)
                yield fact(_RATIO, "×", after / before, row=label, **where)
                memory = other[label].get("peak_memory", 1) / ours[label].get("peak_memory", 1)
                yield fact(_MEMORY, "×", memory, row=label, **where)


def _time_section(facts: pl.DataFrame) -> Section:
    """Return the section on times of both sets."""
    ratios, memory = _told(facts, _RATIO), _told(facts, _MEMORY)
    found = {
        "faster": [name for name, ratio in ratios.items() if ratio.high < 1],
        "slower": [name for name, ratio in ratios.items() if ratio.low > 1],
    }
    changed = [f"{name} ({ratio.value:.2f}×)" for name, ratio in memory.items() if abs(ratio.value - 1) > _NOTED]
    remarks = [
        f"b is {words} beyond the quartiles in {len(names)} of {len(ratios)} rows: {', '.join(names)}."
        for words, names in found.items()
        if names
    ]
    if changed:
        remarks.append(f"Peak memory of b as a multiple of a's, where it differs: {', '.join(changed)}.")
    return Section(
        title=f"times, device: {facts['device'][0]}",
        facts=facts,
        columns=[
            *(column(f"{name} (ms)", name, "{value:#.3g}", factor=1e3) for name in "ab"),
            column("b / a", _RATIO),
            column("range", _RATIO, "{low:.2f}–{high:.2f}"),
        ],
        legend=(
            "Medians of a run's rounds. b / a: below 1, b is faster. Range: from b's lower quartile over a's upper one "
            "to b's upper over a's lower. Rounds of one run are closer to each other than runs are."
        ),
        names=_CASE,
        remarks=remarks,
    )


def _unmatched_section(pairs: Sequence[Pair]) -> Section:
    """Return the section on cases that the sets do not have for the same seeds."""
    facts: list[Fact] = []
    for pair in pairs:
        record = next(iter({**pair[0], **pair[1]}.values()))
        who = {"task": " ".join(_names(record)), "row": f"{record['kind']}, {record['config']['device']}"}
        facts += [
            fact(name, "seeds", len(_finished(runs)), note=_count(runs), **who)
            for name, runs in zip("ab", pair, strict=True)
        ]
    return Section(
        title=UNMATCHED,
        facts=table(facts),
        columns=[column(name, name, "{note}") for name in "ab"],
        legend="Number of seeds that have results. The same case has the same configuration to the last option.",
        names={"case": "task", "kind and device": "row"},
    )


def _told(facts: pl.DataFrame, metric: str) -> dict[str, Estimate]:
    """Return what is known of a metric by case and engine, in words."""
    return {
        f"{row['task']} {row['row']}": estimate_of(row) for row in select(facts, metric=metric).iter_rows(named=True)
    }


def _pairs(a: Sequence[Record], b: Sequence[Record]) -> Iterator[Pair]:
    """Yield the records of each configuration, those of ``a`` first."""
    groups: dict[tuple[str, str], Pair] = defaultdict(lambda: ({}, {}))
    for n, records in enumerate((a, b)):
        for record in records:
            key = record["kind"], json.dumps(record["config"], sort_keys=True)
            groups[key][n][record["seeds"][0]] = record  # type: ignore[index]
    yield from groups.values()


def _finished(runs: Runs) -> dict[int, Record]:
    return {seed: record for seed, record in runs.items() if not error_of(record)}


def _count(runs: Runs) -> str:
    finished = len(_finished(runs))
    return f"{finished}, {len(runs) - finished} failed" if finished < len(runs) else f"{finished}"


def _names(record: Record) -> tuple[str, str]:
    """Return a case's topic and subject, as in its id."""
    _, topic, *subject, _device, _seed, _digest = record["case"].split("/")
    return topic, "/".join(subject)
