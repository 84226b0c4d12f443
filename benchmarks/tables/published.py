"""Figures that others have published, set beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import isnan, nan

from matplotlib.axes import Axes

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend
from gradfree.benchmarks.tables.estimates import Estimate, paired
from gradfree.benchmarks.tables.experiment import Part
from gradfree.benchmarks.tables.section import Plots, Section
from gradfree.benchmarks.tables.verdict import SAME, shift, signed

_OUTCOMES = {"higher": "agrees", "lower": "disagrees", SAME: "too close to tell"}
"""What a difference means where it is to be above 0."""
_INK = "0.2"
"""Of figures that are no engine's line."""


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
        quantity: what the columns' figures are, where their names do not say so.
    """

    source: str
    hardware: str
    columns: tuple[str, ...]
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    differs: tuple[str, ...] = ()
    quantity: str = ""


@dataclass(frozen=True)
class Beside(Part):
    """A part's figures beside published ones; the part itself stands in the suite as well.

    Attributes:
        part: whose figures.
        published: the others.
    """

    part: Part
    published: Published

    @property
    def optional(self) -> bool:
        """Whether the part is."""
        return self.part.optional

    def timing(self, device: str) -> Iterator[Case]:
        """Yield nothing: the part does."""
        return iter(())

    def section(self, records: Mapping[str, Record], device: str) -> BesideSection | None:
        """Return both figures."""
        found = self.part.section(records, device)
        return None if found is None else BesideSection(found, self.published, _hardware(records, device))


def _hardware(records: Mapping[str, Record], device: str) -> str:
    """Say what the records of ``device`` were taken on."""
    environments = [r["environment"] for r in records.values() if r["config"]["device"] == device]
    told = [f"{e['device']}, {e['cpus']} CPU cores, {e['platform']}, torch {e['torch']}" for e in environments]
    return "; ".join(dict.fromkeys(told))


@dataclass(frozen=True)
class BesideSection(Section):
    """Our figures, those of a part's section, beside published ones."""

    section: Section
    published: Published
    hardware: str

    @property
    def _ours(self) -> dict[str, dict[str, str]]:
        """Our table's figures by row and column."""
        head, *rows = self.section.cells()
        return {label: dict(zip(head[1:], cells, strict=True)) for label, *cells in rows}

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"ours beside {self.published.source}; {self.section.title}"

    @property
    def legend(self) -> str:
        """Say where both were measured."""
        told = f"Ours: {self.hardware}. The paper's: {self.published.hardware}. –: not known."
        if not self.published.claims:
            return told
        return (
            f"{told} Differences: seed by seed, ± 95 % confidence interval; too close to tell where that has 0 in it."
        )

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and its rows."""
        known = self._known
        corner, *_ = next(self.section.cells())
        yield [
            corner,
            *(text for c in self.published.columns for text in ([c, f"{c}, paper"] if c in known else [c])),
        ]
        for label, cells in self._ours.items():
            row = [label]
            for column in self.published.columns:
                row.append(cells.get(column, "–"))
                if column in known:
                    known_here = self._is_known(label, column)
                    row.append(f"{self.published.figures[label][column]:g}" if known_here else "–")
            yield row

    @property
    def _known(self) -> list[str]:
        """The columns that the paper has a figure of for one of our rows."""
        return [c for c in self.published.columns if any(self._is_known(row, c) for row in self._ours)]

    def _is_known(self, row: str, column: str) -> bool:
        return column in self.published.figures.get(row, {})

    def remarks(self) -> Iterator[str]:
        """Yield whether what the paper says holds here, and in what the settings differ."""
        for claim in self.published.claims:
            yield f"The paper: {claim.says}. Ours, {claim.column}: {self._outcome(claim.ascending, claim.column)}."
        for difference in self.published.differs:
            yield f"Not as in the paper: {difference}."

    def _outcome(self, rows: Sequence[str], column: str) -> str:
        cells, scores = self._ours, self.section.scores(column)
        told = [f"{row} {cells.get(row, {}).get(column, '–')}" for row in rows]
        differences = [paired(scores.get(high, {}), scores.get(low, {})) for low, high in pairwise(rows)]
        found = [_OUTCOMES.get(shift(difference), "not known") for difference in differences]
        outcome = next((o for o in ("not known", "disagrees", "too close to tell") if o in found), "agrees")
        known = [f"{signed(d.mean)} ± {d.margin:.2f}" for d in differences if not isnan(d.margin)]
        return f"{', '.join(told)}; {', '.join([*(f'difference {d}' for d in known), outcome])}"

    def plots(self) -> Plots:
        """Return what draws our figures against the paper's."""
        return {f"{self.published.source}: {c}": partial(self._draw, column=c) for c in self._known}

    def _draw(self, axes: Axes, styles: Styles, column: str) -> None:
        """Draw both figures of each row that the paper has, side by side."""
        cells, scores = self._ours, self.section.scores(column)
        rows = [row for row in cells if self._is_known(row, column)]
        theirs = [self.published.figures[row][column] for row in rows]
        ours = [_number(cells[row].get(column, "–")) for row in rows]
        margins = [Estimate.of(list(scores.get(row, {}).values())).margin for row in rows]
        axes.hlines(rows, theirs, ours, color="0.8", zorder=0)
        axes.plot(theirs, rows, "o", color=_INK, markersize=9, fillstyle="none", label="the paper's")
        axes.errorbar(ours, rows, xerr=margins, fmt="o", color=_INK, markersize=5, capsize=3, label="ours")
        axes.invert_yaxis()
        axes.set_xlabel(f"{self.published.quantity} {column}".strip())
        axes.set_ylabel(next(self.section.cells())[0])
        add_legend(axes)


def _number(cell: str) -> float:
    """Return the number that a cell begins with; NaN where there is none."""
    try:
        return float(cell.split()[0])
    except ValueError:
        return nan
