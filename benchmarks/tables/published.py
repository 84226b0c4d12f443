"""Figures that others have published, set beside ours."""

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
from gradfree.benchmarks.tables.verdict import SAME, shift, signed

_OUTCOMES = {"higher": "agrees", "lower": "disagrees", SAME: "too close to tell"}
"""What a difference means where it is to be above 0."""
_HARDWARE = "hardware"


@dataclass(frozen=True)
class Claim:
    """What a paper says about an order.

    Attributes:
        says: in words.
        column: of the table, with what it is about.
        ascending: rows of the table, by their scores as they are to rise.
    """

    says: str
    column: str
    ascending: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """What a paper prints.

    Attributes:
        source: of the figures: paper and table.
        hardware: that they were measured on.
        columns: of a part's table that are set beside the paper's.
        figures: the paper's, by row and column; what is left out is not known.
        claims: what the paper says in words alone.
        differs: in what our settings are not the paper's.
    """

    source: str
    hardware: str
    columns: tuple[str, ...]
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Beside(Experiment):
    """An experiment's figures beside published ones; the experiment itself stands in the suite as well.

    Attributes:
        experiment: whose figures.
        published: the others.
    """

    experiment: Experiment
    published: Published

    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return the experiment's facts, the paper's of the same rows, and what ours were measured on."""
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
        """Return both figures of each column, and what becomes of the paper's claims."""
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
        """Say where both were measured."""
        legend = f"Ours: {hardware}. The paper's: {self.published.hardware}. –: not known."
        if not self.published.claims:
            return legend
        return (
            f"{legend} Differences: seed by seed, ± 95 % confidence interval; too close to tell where that has 0 in it."
        )

    def _claims(self, ours: Section) -> Iterator[str]:
        """Yield whether what the paper says holds here."""
        for claim in self.published.claims:
            scores, found = _outcome(claim, ours)
            yield f"The paper: {claim.says}. Ours, {claim.column}: {', '.join(scores)}; {', '.join(found)}."


def _theirs(column: Column, source: str) -> Column:
    """Return the column of a paper's figures."""
    figures = tuple(replace(figure, template="{value:g}") for figure in column.figures[:1])
    return Column(f"{column.heading}, paper", figures, {**column.where, "source": source})


def _of(column: Column, facts: pl.DataFrame) -> pl.DataFrame:
    """Return the facts that a column shows first."""
    if not column.figures:
        return facts.clear()
    unit = {} if column.figures[0].unit is None else {"unit": column.figures[0].unit}
    return select(facts, **{"source": None, **column.where, **unit, "metric": column.figures[0].metric})


def _outcome(claim: Claim, ours: Section) -> tuple[list[str], list[str]]:
    """Return the figures that a claim is about, and their differences with what those come to."""
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
    outcomes = [_OUTCOMES.get(shift(difference), "not known") for difference in found]
    outcome = next((o for o in ("not known", "disagrees", "too close to tell") if o in outcomes), "agrees")
    known = [f"difference {signed(d.value)} ± {d.margin:.2f}" for d in found if not isnan(d.margin)]
    return [f"{row} {shown.get(row, UNKNOWN)}" for row in claim.ascending], [*known, outcome]


def _hardware(records: Mapping[str, Record], device: str) -> str:
    """Say what the records of ``device`` were taken on."""
    environments = [r["environment"] for r in records.values() if r["config"]["device"] == device]
    machines = [f"{e['device']}, {e['cpus']} CPU cores, {e['platform']}, torch {e['torch']}" for e in environments]
    return "; ".join(dict.fromkeys(machines))
