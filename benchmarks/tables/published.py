"""Published figures shown beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isnan

from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.column import UNKNOWN, Column
from gradfree.benchmarks.tables.experiment import Experiment
from gradfree.benchmarks.tables.facts import Estimate, difference_to, differences, estimates, fact, select, table
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tables.verdict import SAME, direction, signed

_OUTCOMES = {"higher": "agrees", "lower": "disagrees", SAME: "too close to tell"}
"""The outcome of a claim that a difference is positive, by the difference's direction."""
_HARDWARE = "hardware"


@dataclass(frozen=True)
class Claim:
    """A paper's claim about the order of some rows.

    Attributes:
        says: the claim in words.
        column: the table's column that it is about.
        ascending: rows of the table, in the order of rising scores.
    """

    says: str
    column: str
    ascending: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """A paper's figures and claims.

    Attributes:
        source: paper and table.
        hardware: the hardware that the paper measured on.
        columns: columns of our table that have published counterparts.
        figures: the paper's figures by row and column; missing ones are unknown.
        claims: statements of the paper without figures.
        differs: differences between our settings and the paper's.
    """

    source: str
    hardware: str
    columns: tuple[str, ...]
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class WithPublished(Experiment):
    """An experiment's figures beside published ones; the suite also has the experiment by itself.

    Attributes:
        experiment: the source of our figures.
        published: the paper's figures and claims.
    """

    experiment: Experiment
    published: Published

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return the experiment's facts, the paper's facts for the same rows, and our hardware."""
        ours = self.experiment.facts(records, device)
        if ours.is_empty():
            return ours
        shown = self.experiment.section(ours)
        columns, rows = {c.heading: c for c in shown.columns}, {row[0].text for row in shown.rows}
        theirs = [
            fact(
                columns[heading].figures[0].metric,
                columns[heading].figures[0].unit or "",
                value / columns[heading].figures[0].factor,
                **{**columns[heading].where, "row": row, "source": self.published.source, "device": device},
            )
            for row, figures in self.published.figures.items()
            for heading, value in figures.items()
            if row in rows and heading in columns and heading in self.published.columns
        ]
        return pl.concat([ours, table([*theirs, fact(_HARDWARE, "", note=_hardware(records, device))])])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section with our and the paper's figures side by side, and the outcome of each claim."""
        source = self.published.source
        ours = self.experiment.section(facts.filter(pl.col("source").is_null(), pl.col("metric") != _HARDWARE))
        columns = {column.heading: column for column in ours.columns}
        shown = [columns.get(heading, Column(heading, ())) for heading in self.published.columns]
        pairs = [(column, _theirs(column, source)) for column in shown]
        known = [column for column, theirs in pairs if not _of(theirs, facts).is_empty()]
        return replace(
            ours,
            title=f"ours beside {source}; {ours.title}",
            facts=facts,
            columns=[one for ours, theirs in pairs for one in ((ours, theirs) if ours in known else (ours,))],
            legend=self._legend(select(facts, metric=_HARDWARE)["note"][0]),
            verdicts=(),
            remarks=[*self._claims(ours), *(f"Not as in the paper: {what}." for what in self.published.differs)],
            charts=(),
            answer="",
        )

    def _legend(self, hardware: str) -> str:
        """Return the legend, which names the hardware of both."""
        legend = f"Ours: {hardware}. The paper's: {self.published.hardware}. –: not known."
        if not self.published.claims:
            return legend
        return f"{legend} Differences: seed by seed, ± 95 % confidence interval; too close to tell if it contains 0."

    def _claims(self, ours: Section) -> Iterator[str]:
        """Yield a sentence on each claim: whether our figures agree."""
        for claim in self.published.claims:
            scores, found = _outcome(claim, ours)
            yield f"The paper: {claim.says}. Ours, {claim.column}: {', '.join(scores)}; {', '.join(found)}."


def _theirs(column: Column, source: str) -> Column:
    """Return the column of the paper's figures."""
    figures = tuple(replace(figure, template="{value:g}") for figure in column.figures[:1])
    return Column(f"{column.heading}, paper", figures, {**column.where, "source": source})


def _of(column: Column, facts: pl.DataFrame) -> pl.DataFrame:
    """Return the facts of the column's first figure."""
    if not column.figures:
        return facts.clear()
    unit = {} if column.figures[0].unit is None else {"unit": column.figures[0].unit}
    return select(facts, **{"source": None, **column.where, **unit, "metric": column.figures[0].metric})


def _outcome(claim: Claim, ours: Section) -> tuple[list[str], list[str]]:
    """Return our figures for a claim, and their differences followed by the outcome."""
    columns = {column.heading: column for column in ours.columns}
    if claim.column not in columns:
        return [f"{row} {UNKNOWN}" for row in claim.ascending], ["not known"]
    column, at = columns[claim.column], ours.head.index(claim.column)
    shown = {row[0].text: row[at].text for row in ours.rows}
    metric = column.figures[0].metric
    single = ours.facts.filter(*(pl.col(name).eq_missing(value) for name, value in column.where.items()))
    found = [
        estimates(differences(single, metric, {high: low}), metric=difference_to(low, metric)).get(high, Estimate())
        for low, high in pairwise(claim.ascending)
    ]
    outcomes = [_OUTCOMES.get(direction(difference), "not known") for difference in found]
    outcome = next((o for o in ("not known", "disagrees", "too close to tell") if o in outcomes), "agrees")
    known = [f"difference {signed(d.value)} ± {d.margin:.2f}" for d in found if not isnan(d.margin)]
    return [f"{row} {shown.get(row, UNKNOWN)}" for row in claim.ascending], [*known, outcome]


def _hardware(records: Mapping[str, Record], device: str) -> str:
    """Return the hardware that the records of ``device`` were made on."""
    environments = [r["environment"] for r in records.values() if r["config"]["device"] == device]
    machines = [f"{e['device']}, {e['cpus']} CPU cores, {e['platform']}, torch {e['torch']}" for e in environments]
    return "; ".join(dict.fromkeys(machines))
