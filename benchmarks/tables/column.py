"""Columns of a table: which facts their cells show, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, NamedTuple

UNKNOWN = "–"
DIVERGED = "diverged"
_NOTHING = 1e-9
"""What is left of differences by rounding."""
_NUMBERS = ("value", "low", "high")


@dataclass(frozen=True)
class Figure:
    """One fact of a table's cell.

    Attributes:
        metric: of the fact.
        template: its text, of ``value``, ``low``, ``high``, ``margin``, ``n`` and ``note``.
        unit: of the fact, where the metric has several.
        factor: what numbers are multiplied by: 1e3 for seconds shown as milliseconds.
    """

    metric: str
    template: str = "{value:.2f}"
    unit: str | None = None
    factor: float = 1.0

    def text(self, fact: Mapping[str, Any]) -> str:
        """Return what is shown of ``fact``: a note in place of a value that is not known."""
        if fact["value"] is None and fact["note"]:
            return str(fact["note"])
        if fact["value"] is not None and isnan(fact["value"]):
            return DIVERGED
        value, low, high = (_Number(nan if fact[name] is None else self.factor * fact[name]) for name in _NUMBERS)
        text = self.template.format(
            value=value, low=low, high=high, margin=(high - low) / 2, n=fact["n"], note=fact["note"]
        )
        return text.replace("nan–nan", UNKNOWN).replace("nan", UNKNOWN)


class _Number(float):
    """A number that is not shown as 0 unless it is, or all but."""

    def __format__(self, spec: str) -> str:
        text = super().__format__(spec)
        return f"{float(self):.1g}" if abs(self) > _NOTHING and not float(text) else text


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: with the unit.
        figures: of each cell; those behind the first stand in brackets, and not behind words.
        where: which facts, by their columns: ``{"setting": "5 hidden layers"}``.
    """

    heading: str
    figures: tuple[Figure, ...]
    where: Mapping[str, Any] = field(default_factory=dict)

    def cell(self, facts: Sequence[Mapping[str, Any]]) -> Cell:
        """Return the cell of a row that these facts are known of."""
        found = [(figure, fact) for figure in self.figures if (fact := self._fact(figure, facts))]
        if not found or found[0][0] is not self.figures[0]:
            return Cell(UNKNOWN, None)
        (first, fact), *rest = found
        text, value = first.text(fact), fact["value"]
        if value is not None and not isnan(value):
            text += "".join(f" [{figure.text(other)}]" for figure, other in rest)
        return Cell(text, value)

    def _fact(self, figure: Figure, facts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        wanted = {"source": None, **self.where, "metric": figure.metric}
        if figure.unit is not None:
            wanted["unit"] = figure.unit
        return next((fact for fact in facts if all(fact[name] == value for name, value in wanted.items())), None)


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: as shown.
        value: to sort by; ``None`` for words and what is not known.
    """

    text: str
    value: float | None


def column(heading: str, metric: str, template: str = "{value:.2f}", unit: str | None = None, **more: Any) -> Column:
    """Return a column of one figure a cell; ``more`` is the factor, and which facts."""
    factor = more.pop("factor", 1.0)
    return Column(heading, (Figure(metric, template, unit, factor),), more)
