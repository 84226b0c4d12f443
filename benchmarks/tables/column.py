"""Columns of a table: which facts their cells show, and in which format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, NamedTuple

from gradfree.benchmarks.tables.facts import FEWEST

UNKNOWN = "–"
DIVERGED = "diverged"
_ROUNDING = 1e-9
"""Absolute values up to this are rounding errors of a difference."""
_NUMBERS = ("value", "low", "high")


@dataclass(frozen=True)
class Figure:
    """One fact shown in a cell.

    Attributes:
        metric: the fact's metric.
        template: format string with ``value``, ``low``, ``high``, ``margin``, ``n`` and ``note``; the margin
            is unknown for fewer than :data:`FEWEST` seeds.
        unit: the fact's unit, if the metric has several.
        factor: multiplies the numbers: 1e3 shows seconds as milliseconds.
    """

    metric: str
    template: str = "{value:.2f}"
    unit: str | None = None
    factor: float = 1.0

    def text(self, fact: Mapping[str, Any]) -> str:
        """Return the text for ``fact``: its note if the value is unknown."""
        if fact["value"] is None and fact["note"]:
            return str(fact["note"])
        if fact["value"] is not None and isnan(fact["value"]):
            return DIVERGED
        value, low, high = (_Number(nan if fact[name] is None else self.factor * fact[name]) for name in _NUMBERS)
        margin = (high - low) / 2 if fact["n"] >= FEWEST else nan
        text = self.template.format(value=value, low=low, high=high, margin=margin, n=fact["n"], note=fact["note"])
        return text.replace("nan–nan", UNKNOWN).replace("nan", UNKNOWN)


class _Number(float):
    """A number that is formatted with one significant digit where it would be rounded to 0."""

    def __format__(self, spec: str) -> str:
        text = super().__format__(spec)
        return f"{float(self):.1g}" if abs(self) > _ROUNDING and not float(text) else text


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: includes the unit.
        figures: shown in each cell; all after the first are in brackets, and omitted if the first is a note.
        where: selects facts by their columns: ``{"setting": "5 hidden layers"}``.
    """

    heading: str
    figures: tuple[Figure, ...]
    where: Mapping[str, Any] = field(default_factory=dict)

    def cell(self, facts: Sequence[Mapping[str, Any]]) -> Cell:
        """Return the cell of a row, given the row's facts."""
        found = [(figure, fact) for figure in self.figures if (fact := self._fact(figure, facts))]
        if not found or found[0][0] is not self.figures[0]:
            return Cell(UNKNOWN, None)
        (first, fact), *rest = found
        text, value = first.text(fact), fact["value"]
        if value is not None and not isnan(value):
            text += "".join(f" [{figure.text(other)}]" for figure, other in rest)
        return Cell(text, value)

    def _fact(self, figure: Figure, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        wanted = {**self.where, "metric": figure.metric}
        if figure.unit is not None:
            wanted["unit"] = figure.unit
        return next((fact for fact in facts if all(fact[name] == value for name, value in wanted.items())), None)


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: what is shown.
        value: sort key; ``None`` for notes and unknown values.
    """

    text: str
    value: float | None


def column(heading: str, metric: str, template: str = "{value:.2f}", unit: str | None = None, **more: Any) -> Column:
    """Return a column with one figure a cell; ``more`` holds ``factor`` and the columns of :attr:`Column.where`."""
    factor = more.pop("factor", 1.0)
    return Column(heading, (Figure(metric, template, unit, factor),), more)
