"""One part of a report: a table, what it says in words, plots, and the numbers behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from typing import ClassVar, NamedTuple

from matplotlib.axes import Axes

from gradfree.benchmarks.tables.drawing import Styles
from gradfree.benchmarks.tables.estimates import Estimate, Spread

Draw = Callable[[Axes, Styles], None]
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
    def mean(cls, subject: str, setting: str, quantity: str, unit: str, estimate: Estimate) -> Fact:
        """Tell an estimate."""
        return cls(subject, setting, quantity, unit, estimate.mean, estimate.low, estimate.high, estimate.count)

    @classmethod
    def median(cls, subject: str, setting: str, quantity: str, unit: str, spread: Spread) -> Fact:
        """Tell a median."""
        return cls(subject, setting, quantity, unit, spread.median, spread.low, spread.high)


class Section(ABC):
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

    def scores(self, column: str) -> Mapping[str, Mapping[int, float]]:
        """Return the scores behind a column of the table, by row and seed; nothing if it is not of scores."""
        return {}

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
