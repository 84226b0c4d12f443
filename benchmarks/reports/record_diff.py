"""Sets of records side by side, in the order they are named: of commits, or of machines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase

import polars as pl

from gradfree.benchmarks.records.provenance import Provenance, described
from gradfree.benchmarks.records.records import Record, RecordFile, error_of
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Estimate, Fact, estimate_of, fact, select, table
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tables.verdict import shift
from gradfree.benchmarks.training.outcomes import score_in
from gradfree.cli import UsageError

Runs = Mapping[int, Record]
"""Records that differ in nothing but the seed, by it."""
Group = Mapping[str, Runs]
"""Those of all sets, by the sets' letters."""

UNMATCHED = "not in all"
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


def compare(*sets: Sequence[Record]) -> list[Section]:
    """Return what the records of all sets with the same configuration tell, and which some sets lack.

    The sets are called a, b and so on; the first is what the others are compared with.
    """
    groups = list(_groups(dict(zip(ascii_lowercase, sets, strict=False))))
    scores, times = (table(fact for group in groups for fact in told(group)) for told in (_score_facts, _time_facts))
    sections = [
        *(_score_section(found) for _, found in scores.group_by("source", "device", maintain_order=True)),
        *(_time_section(found) for _, found in times.group_by("device", maintain_order=True)),
    ]
    unmatched = [group for group in groups if len({frozenset(_finished(runs)) for runs in group.values()}) > 1]
    return [*sections, _unmatched_section(unmatched)] if unmatched else sections


def environment_changes(*sets: Sequence[Record]) -> Iterator[str]:
    """Yield in what the environments of the sets differ, and where one mixes several."""
    named = dict(zip(ascii_lowercase, sets, strict=False))
    for name, records in named.items():
        for warning in Provenance(records).warnings():
            yield f"{name}: {warning}"
    environments = {name: [described(record) for record in records] for name, records in named.items()}
    for field in dict.fromkeys(field for found in environments.values() for e in found for field in e):
        values = {
            name: ", ".join(dict.fromkeys(e.get(field, "unknown") for e in found))
            for name, found in environments.items()
        }
        if len(set(values.values())) > 1:
            told = "; ".join(f"{value} in {name}" for name, value in values.items())
            yield f"{' and '.join(values)} differ, {field}: {told}."


def _score_facts(group: Group) -> Iterator[Fact]:
    """Yield the test scores of each set and their differences to the first, from the seeds that all of them have."""
    scores = {
        name: {s: score_in(r["results"], "test") for s, r in _finished(runs).items() if "test" in r["results"]}
        for name, runs in group.items()
    }
    first, *others = (name for name, found in scores.items() if found) if any(scores.values()) else ("",)
    common = sorted(set.intersection(*(set(scores[name]) for name in (first, *others)))) if others else []
    if not common:
        return
    record = group[first][common[0]]
    score, (task, row) = record["config"]["task"]["score"], _names(record)
    metric = f"test {score['name']} ({score['unit']})"
    who = {"task": task, "row": row, "device": record["config"]["device"], "source": metric}
    for name in (first, *others):
        found = Estimate.of([scores[name][seed] for seed in common])
        yield fact("score", score["unit"], found, setting=name, **who)
    for name in others:
        change = Estimate.of_differences([scores[name][seed] - scores[first][seed] for seed in common])
        yield fact("difference", score["unit"], change, setting=name, **who)


def _time_facts(group: Group) -> Iterator[Fact]:
    """Yield time and memory of each row in each set, for each seed, and their ratios to the first set's."""
    finished = {name: _finished(runs) for name, runs in group.items()}
    for seed in sorted({seed for runs in finished.values() for seed in runs}):
        known = {name: runs[seed] for name, runs in finished.items() if seed in runs}
        record = next(iter(known.values()))
        task, manner = _names(record)
        where = {"task": task + manner.removeprefix("all rows"), "device": record["config"]["device"]}
        rows = {name: {row["label"]: row for row in r["results"].get("rows", [])} for name, r in known.items()}
        for label in dict.fromkeys(label for found in rows.values() for label in found):
            timed = {name: found[label] for name, found in rows.items() if "time" in found.get(label, {})}
            if len(timed) > 1:
                yield from (told | {"row": label, **where} for told in _ratios(timed))


def _ratios(timed: Mapping[str, Mapping[str, float]]) -> Iterator[Fact]:
    """Yield what a row takes in each set, and as a multiple of the first one's."""
    first, *_ = timed
    base, memory = Estimate.recorded(timed[first], "time"), timed[first].get("peak_memory", 1)
    for name, row in timed.items():
        time = Estimate.recorded(row, "time")
        yield fact(_TIME, "s", time, setting=name)
        yield fact(_TIME, "×", Estimate(1.0) if name == first else time / base, setting=name)
        yield fact(_MEMORY, "×", row.get("peak_memory", 1) / memory, setting=name)


def _score_section(facts: pl.DataFrame) -> Section:
    """Return the section on test scores."""
    title, facts = (
        f"{facts['source'][0]}, device: {facts['device'][0]}",
        facts.with_columns(source=pl.lit(None, pl.String)),
    )
    (first, *others) = names = facts["setting"].unique().sort().to_list()
    remarks = []
    for name in others:
        found = _told(facts, "difference", name)
        listed = {words: [row for row, d in found.items() if shift(d) == words] for words in ("higher", "lower")}
        remarks += [f"{words.capitalize()} in {name}: {', '.join(rows)}." for words, rows in listed.items() if rows]
        same = [d for d in found.values() if d.value == d.margin == 0]
        where = f" in {name}" if len(others) > 1 else ""
        remarks.append(f"Exactly the same{where} with every seed: {len(same)} of {len(found)}.")
    return Section(
        title=title,
        facts=facts,
        columns=[
            Column("seeds", (Figure("score", "{n}"),), {"setting": first}),
            *(column(name, "score", setting=name) for name in names),
            *(
                column(f"{name} − {first}", "difference", "{value:+.2f} ± {margin:.2f}", setting=name)
                for name in others
            ),
        ],
        legend="−: mean of the differences, seed by seed, ± its 95 % confidence interval (Student's t).",
        names=_CASE,
        remarks=remarks,
        charts=_history(title, facts, Figure("score"), Axis(title.partition(",")[0])),
    )


def _time_section(facts: pl.DataFrame) -> Section:
    """Return the section on times."""
    device = facts["device"][0]
    (first, *others) = names = facts["setting"].unique().sort().to_list()
    remarks = []
    for name in others:
        ratios, memory = _told(facts, _TIME, name, unit="×"), _told(facts, _MEMORY, name)
        found = {
            "faster": [row for row, ratio in ratios.items() if ratio.high < 1],
            "slower": [row for row, ratio in ratios.items() if ratio.low > 1],
        }
        remarks += [
            f"{name} is {words} beyond the quartiles in {len(rows)} of {len(ratios)} rows: {', '.join(rows)}."
            for words, rows in found.items()
            if rows
        ]
        if changed := [f"{row} ({ratio.value:.2f}×)" for row, ratio in memory.items() if abs(ratio.value - 1) > _NOTED]:
            remarks.append(f"Peak memory of {name} as a multiple of {first}'s, where it differs: {', '.join(changed)}.")
    title = f"times, device: {device}"
    return Section(
        title=title,
        facts=facts,
        columns=[
            *(column(f"{name} (ms)", _TIME, "{value:#.3g}", "s", setting=name, factor=1e3) for name in names),
            *(
                told
                for name in others
                for told in (
                    column(f"{name} / {first}", _TIME, unit="×", setting=name),
                    column("range", _TIME, "{low:.2f}–{high:.2f}", "×", setting=name),
                )
            ),
        ],
        legend=(
            f"Medians of a run's rounds. /: below 1, it is faster than {first}. Range: from its lower quartile over "
            f"{first}'s upper one to its upper over {first}'s lower. Rounds of one run are closer to each other than "
            "runs are."
        ),
        names=_CASE,
        remarks=remarks,
        charts=_history(title, facts, Figure(_TIME, unit="×"), Axis(f"time, as a multiple of {first}'s (×)")),
    )


def _history(title: str, facts: pl.DataFrame, figure: Figure, axis: Axis) -> list[Chart]:
    """Return how each row went from set to set, if these are more than two."""
    if facts["setting"].n_unique() < 3:
        return []
    found = (
        points(facts, "setting", figure).with_columns(label=pl.concat_str("task", pl.lit(" "), "row")).sort("setting")
    )
    return [Chart(f"{title}: from set to set", found, Axis("set", "names"), axis, "solid")]


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
        columns=[column(name, name, "{note}") for name in groups[0]],
        legend="Number of seeds that have results. The same case has the same configuration to the last option.",
        names={"case": "task", "kind and device": "row"},
    )


def _told(facts: pl.DataFrame, metric: str, name: str, **where: str) -> dict[str, Estimate]:
    """Return what is known of a metric of a set by case and engine, in words."""
    found = select(facts, metric=metric, setting=name, **where)
    return {f"{row['task']} {row['row']}": estimate_of(row) for row in found.iter_rows(named=True)}


def _groups(sets: Mapping[str, Sequence[Record]]) -> Iterator[Group]:
    """Yield the records of each configuration, those of the first set first."""
    groups: dict[tuple[str, str], dict[str, dict[int, Record]]] = defaultdict(lambda: {name: {} for name in sets})
    for name, records in sets.items():
        for record in records:
            key = record["kind"], json.dumps(record["config"], sort_keys=True)
            groups[key][name][record["seeds"][0]] = record
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
