"""Two sets of records side by side: of two commits, or of two machines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradfree.benchmarks.records.provenance import Provenance, described
from gradfree.benchmarks.records.records import Record, RecordFile, error_of
from gradfree.benchmarks.tables.estimates import Estimate, Spread, paired
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tables.verdict import shift, signed
from gradfree.benchmarks.training.training import score_in
from gradfree.cli import UsageError

Runs = Mapping[int, Record]
"""Records that differ in nothing but the seed, by it."""
Pair = tuple[Runs, Runs]
"""Those of both sets."""

_MEMORY = 0.01
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
    scores: defaultdict[str, list[ScoreChange]] = defaultdict(list)
    times: defaultdict[str, list[TimeChange]] = defaultdict(list)
    for pair in pairs:
        for score in ScoreChange.of(pair):
            scores[score.title].append(score)
        for time in TimeChange.of(pair):
            times[time.title].append(time)
    sections: list[Section] = [ScoreSection(changes) for changes in scores.values()]
    sections += [TimeSection(changes) for changes in times.values()]
    unmatched = [pair for pair in pairs if _finished(pair[0]).keys() != _finished(pair[1]).keys()]
    return [*sections, UnmatchedSection(unmatched)] if unmatched else sections


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


@dataclass(frozen=True)
class ScoreChange:
    """Test scores of one case in both sets, from the seeds that both have.

    Attributes:
        title: the score, and where it was reached.
        topic: the task.
        subject: the engine.
        a: the one set's.
        b: the other's.
        difference: b's less a's, seed by seed.
    """

    title: str
    topic: str
    subject: str
    a: Estimate
    b: Estimate
    difference: Estimate

    @classmethod
    def of(cls, pair: Pair) -> Iterator[ScoreChange]:
        """Yield what two sets of training runs tell; nothing if they are none, or have no seed in common."""
        a, b = (
            {s: score_in(r["results"], "test") for s, r in _finished(runs).items() if "test" in r["results"]}
            for runs in pair
        )
        common = a.keys() & b.keys()
        if not common:
            return
        record = pair[0][min(common)]
        score = record["config"]["task"]["score"]
        title = f"test {score['name']} ({score['unit']}), device: {record['config']['device']}"
        before, after = (Estimate.of([scores[seed] for seed in common]) for scores in (a, b))
        yield cls(title, *_names(record), before, after, paired(b, a))


@dataclass(frozen=True)
class ScoreSection(Section):
    """Test scores of both sets."""

    changes: Sequence[ScoreChange]

    legend = "b − a: mean of the differences, seed by seed, ± its 95 % confidence interval (Student's t)."
    labels = 2

    @property
    def title(self) -> str:
        """Say what was compared."""
        return self.changes[0].title

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a case."""
        yield ["case", "engine", "seeds", "a", "b", "b − a"]
        for c in self.changes:
            figures = [f"{c.a.mean:.2f}", f"{c.b.mean:.2f}", f"{signed(c.difference.mean)} ± {c.difference.margin:.2f}"]
            yield [c.topic, c.subject, str(c.difference.count), *(figure.replace("nan", "–") for figure in figures)]

    def remarks(self) -> Iterator[str]:
        """Yield which scores differ."""
        for words in ("higher", "lower"):
            found = [c for c in self.changes if shift(c.difference) == words]
            if found:
                yield f"{words.capitalize()} in b: {_listed(found)}."
        same = [c for c in self.changes if c.difference.mean == c.difference.margin == 0]
        yield f"Exactly the same with every seed: {len(same)} of {len(self.changes)}."


@dataclass(frozen=True)
class TimeChange:
    """Time and memory of one row of one case in both sets.

    Attributes:
        title: where it was timed.
        topic: what was run, and how.
        subject: the engine.
        a: seconds in the one set.
        b: seconds in the other.
        memory: b's peak as a multiple of a's; 1 if not measured.
    """

    title: str
    topic: str
    subject: str
    a: Spread
    b: Spread
    memory: float

    @property
    def ratio(self) -> Spread:
        """The time in b as a multiple of that in a."""
        return self.b / self.a

    @classmethod
    def of(cls, pair: Pair) -> Iterator[TimeChange]:
        """Yield what two sets of timings tell, for each seed and row that both have."""
        a, b = map(_finished, pair)
        for seed in sorted(a.keys() & b.keys()):
            topic, manner = _names(a[seed])
            topic += manner.removeprefix("all rows")
            title = f"times, device: {a[seed]['config']['device']}"
            own, other = ({row["label"]: row for row in runs[seed]["results"].get("rows", [])} for runs in (a, b))
            for label in own:
                if label in other and "time" in own[label]:
                    before, after = (Spread.recorded(rows[label], "time") for rows in (own, other))
                    memory = other[label].get("peak_memory", 1) / own[label].get("peak_memory", 1)
                    yield cls(title, topic, label, before, after, memory)


@dataclass(frozen=True)
class TimeSection(Section):
    """Times of both sets."""

    changes: Sequence[TimeChange]

    legend = (
        "Medians of a run's rounds. b / a: below 1, b is faster. Range: from b's lower quartile over a's upper one to "
        "b's upper over a's lower. Rounds of one run are closer to each other than runs are."
    )
    labels = 2

    @property
    def title(self) -> str:
        """Say what was compared."""
        return self.changes[0].title

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a case and engine."""
        yield ["case", "engine", "a (ms)", "b (ms)", "b / a", "range"]
        for change in self.changes:
            times = [f"{1e3 * spread.median:#.3g}".rstrip(".") for spread in (change.a, change.b)]
            ratio = change.ratio
            yield [change.topic, change.subject, *times, f"{ratio.median:.2f}", f"{ratio.low:.2f}–{ratio.high:.2f}"]

    def remarks(self) -> Iterator[str]:
        """Yield which times and peaks of memory differ."""
        faster = [c for c in self.changes if c.ratio.high < 1]
        slower = [c for c in self.changes if c.ratio.low > 1]
        for words, found in (("faster", faster), ("slower", slower)):
            if found:
                share = f"{len(found)} of {len(self.changes)}"
                yield f"b is {words} beyond the quartiles in {share} rows: {_listed(found)}."
        memory = [c for c in self.changes if abs(c.memory - 1) > _MEMORY]
        if memory:
            listed = ", ".join(f"{c.topic} {c.subject} ({c.memory:.2f}×)" for c in memory)
            yield f"Peak memory of b as a multiple of a's, where it differs: {listed}."


@dataclass(frozen=True)
class UnmatchedSection(Section):
    """Cases that the sets do not have for the same seeds."""

    pairs: Sequence[Pair]

    title = "not in both"
    legend = "Number of seeds that have results. The same case has the same configuration to the last option."
    labels = 2

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a case."""
        yield ["case", "kind and device", "a", "b"]
        for a, b in self.pairs:
            record = next(iter({**a, **b}.values()))
            where = f"{record['kind']}, {record['config']['device']}"
            yield [" ".join(_names(record)), where, _count(a), _count(b)]


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


def _listed(changes: Sequence[ScoreChange | TimeChange]) -> str:
    return ", ".join(f"{change.topic} {change.subject}" for change in changes)
