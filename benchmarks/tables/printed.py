"""Sections that print their numbers themselves, until all are made of facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from typing import ClassVar, NamedTuple

from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.estimates import Estimate
from gradfree.benchmarks.tables.facts import fact, table
from gradfree.benchmarks.tables.section import Section

Bar = tuple[float, float, float]
"""A value and the ends of its interval."""


class Spread(Estimate):
    """An estimate by the names that it has in printed sections."""

    @property
    def median(self) -> float:
        """The value."""
        return self.value

    @property
    def bar(self) -> Bar:
        """The value with the ends of its interval."""
        return self.value, self.low, self.high

    def __rmul__(self, factor: float) -> Spread:
        """Return the same in another unit."""
        return Spread(factor * self.value, factor * self.low, factor * self.high)


Draw = Callable[..., None]
"""Draws a plot, in the styles of its report."""

Plots = Mapping[str, Draw]
"""What draws each plot, by the plot's title."""


class Fact(NamedTuple):
    """One number of a report, with all that it takes to understand it alone.

    Attributes:
        subject: what was measured: an engine, as a rule.
        setting: where, if a section has several: a depth, a layer.
        quantity: what is told of it.
        unit: of ``value``, ``low`` and ``high``.
        value: mean or median; NaN if unknown.
        low: end of its interval; NaN if it has none.
        high: likewise.
        seeds: number of runs that it is a mean of; 0 if of none.
    """

    subject: str
    setting: str
    quantity: str
    unit: str
    value: float
    low: float = nan
    high: float = nan
    seeds: int = 0

    @classmethod
    def median(cls, subject: str, setting: str, quantity: str, unit: str, spread: Spread) -> Fact:
        """Tell a median."""
        return cls(subject, setting, quantity, unit, spread.median, spread.low, spread.high)


class PrintedSection(ABC):
    """The figures of one comparison."""

    labels: ClassVar[int] = 1
    """How many of the table's first columns name its rows."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Say what was compared."""

    @property
    @abstractmethod
    def legend(self) -> str:
        """Say what the table's signs and columns mean."""

    @abstractmethod
    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and its rows."""

    def verdicts(self) -> Sequence[str]:
        """Return what each row of the table comes to, in words; nothing if that cannot be said row by row."""
        return ()

    def remarks(self) -> Iterator[str]:
        """Yield what else the figures say."""
        return iter(())

    def plots(self) -> Plots:
        """Return what draws the plots."""
        return {}

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        return iter(())


def section_of(printed: PrintedSection) -> Section:
    """Return a printed section as one of facts that are words."""
    (_, *head), *rows = printed.cells()
    corner = next(printed.cells())[0]
    facts = [
        fact(heading, "", row=label, setting=str(n), note=text)
        for n, (label, *cells) in enumerate(rows)
        for heading, text in zip(head, cells, strict=True)
    ]
    return Section(
        title=printed.title,
        facts=table(facts),
        columns=[column(heading, heading) for heading in head],
        legend=printed.legend,
        names={corner: "row"} if len({row[0] for row in rows}) == len(rows) else {corner: "row", "": "setting"},
        verdicts=list(printed.verdicts()),
        remarks=list(printed.remarks()),
    )
