"""Write the figures, tables and charts of README and docs, each between markers, from committed records.

python benchmarks/scripts/figures.py [--check]

`figures.toml` says which record each one comes from. `--check` changes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import pictures
import polars as pl
from pictures import bars, lines

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.column import UNKNOWN, Figure
from gradfree.benchmarks.tables.facts import Estimate, estimate_of, fact, select, table
from gradfree.benchmarks.tables.verdict import SAME
from gradfree.benchmarks.timing.side_by_side import times

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CHARTS = "docs/figures"
_OPENING = re.compile(r"<!-- (?:figure|table|chart): ")
_MARKED = re.compile(r"(<!-- (figure|table|chart): ([\w-]+) -->).*?(<!-- end -->)", re.DOTALL)
_HOW = ("show", "scale", "heading", "suite", "section", "like")
"""What a declared figure has that is no column of the facts."""
Declared = Mapping[str, Any]


class FigureError(Exception):
    """A figure is not declared as it must be, or no record has it."""


class Figures:
    """What `figures.toml` declares.

    Args:
        declared: its contents.
        results: the folder of all records, one folder a suite.
    """

    def __init__(self, declared: Declared, results: Path = ROOT / "benchmarks" / "results"):
        self._declared, self._results = declared, results
        self._facts = cache(partial(_facts, results))

    @property
    def charts(self) -> list[str]:
        """The names of all charts."""
        return list(self._declared.get("chart", ()))

    def of(self, kind: str, name: str) -> str:
        """Return what belongs between the markers of a figure or table."""
        makers: dict[str, Callable[[Declared], str]] = {"figure": self._figure, "table": self._table}
        try:
            return makers[kind](self.declared(kind, name))
        except (FigureError, KeyError) as error:
            raise FigureError(f"[{kind}.{name}]: {error}") from error

    def declared(self, kind: str, name: str) -> Declared:
        """Return what is declared of a name, with all that it takes from another."""
        found = self._declared.get(kind, {}).get(name)
        if found is None:
            raise FigureError(f"{name} is not declared in figures.toml")
        return {**self.declared(kind, found["like"]), **found} if "like" in found else found

    def filled(self, text: str) -> str:
        """Return `text` with figures in place of their names in braces."""
        return text.format_map(_ByName(partial(self.of, "figure")))

    def _figure(self, declared: Declared) -> str:
        known = self.known(declared)
        if len(known) != 1:
            seen = "; ".join(str({name: value for name, value in told.items() if value is not None}) for told in known)
            raise FigureError(f"{len(known)} facts where one is wanted. {seen}")
        return shown(known[0], declared)

    def known(self, declared: Declared) -> list[dict[str, Any]]:
        """Return the facts that a declaration selects, each value once."""
        facts = self._facts(declared["suite"])
        if "section" in declared:
            facts = facts.filter(pl.col("section").str.starts_with(declared["section"]))
        where = {name: value for name, value in declared.items() if name not in _HOW}
        found = select(facts, **where).unique(["at", "value", "low", "high"], maintain_order=True)
        return list(found.drop("section").iter_rows(named=True))

    def _table(self, declared: Declared) -> str:
        made = self._cells if "cells" in declared else self._programs if "each" in declared else self._selected
        head, *rows = [f"| {' | '.join(line)} |" for line in made(declared)]
        labels = declared.get("labels", 1)
        aligned = "|" + "---|" * labels + "---:|" * (head.count(" | ") + 1 - labels)
        return "\n".join(["", head, aligned, *rows, ""])

    def _cells(self, declared: Declared) -> Iterator[list[str]]:
        yield declared["head"]
        for row in declared["cells"]:
            yield [self.filled(cell) for cell in row]

    def _programs(self, declared: Declared) -> Iterator[list[str]]:
        """Yield a table of other people's programs: a row each, with the columns of its records and two figures."""
        yield declared["head"]
        for row in _programs(self._results / declared["suite"] / "records.csv"):
            where = {"suite": declared["suite"], "task": row["client"], "setting": row["case"], "row": row["span"]}
            speed = self._figure({**where, "metric": "time"})
            memory = self._figure({**where, "metric": "peak memory", "show": "times"})
            yield [cell.format_map({**row, "speed": speed, "memory": memory}) for cell in declared["each"]]

    def _selected(self, declared: Declared) -> Iterator[list[str]]:
        """Yield a table whose rows and columns are queries."""
        yield [declared["heading"], *(column["heading"] for column in declared["columns"])]
        for value, label in declared["rows"].items():
            found = [declared["where"] | {declared["by"]: value} | column for column in declared["columns"]]
            yield [label, *(self._figure(one) if self.known(one) else UNKNOWN for one in found)]

    def picture(self, name: str) -> Picture:
        """Return what a chart is made of."""
        declared = self.declared("chart", name)
        title = self.filled(declared["title"])
        if "bars" in declared:
            found: Any = [self._bar(*bar) for bar in declared["bars"].items()]
            return Picture(bars, (title, found, declared["baseline"]))
        found = {label: self._line(declared, row) for row, label in declared["rows"].items()}
        return Picture(lines, (title, found, declared["x"], declared["y"], declared.get("scale", "log")))

    def _bar(self, label: str, name: str) -> dict[str, Any]:
        (told,) = self.known(self.declared("figure", name))
        return {"label": label, "value": 1 / told["value"], "text": self.of("figure", name)}

    def _line(self, declared: Declared, row: str) -> list[tuple[float, float]]:
        """Return the points of a row, of a training by its seconds: steps, by the time of one."""
        each = self.known({**declared["step"], "row": row})[0]["value"] if "step" in declared else 1.0
        return [(told["at"] * each, told["value"]) for told in self.known({**declared["where"], "row": row})]

    def alternative(self, name: str) -> str:
        """Return what a chart says in words."""
        declared = self.declared("chart", name)
        said = [f"{label}: {self.of('figure', figure)}" for label, figure in declared.get("bars", {}).items()]
        return ". ".join([self.filled(declared["title"]), *(["; ".join(said)] if said else [])])


class Picture(NamedTuple):
    """A chart: what draws it, and of what."""

    draw: Callable[..., str]
    given: tuple[Any, ...]

    @property
    def mark(self) -> str:
        """A comment in its SVG that tells what it is made of: the drawing itself differs by the fonts of a machine."""
        made_of = repr(self.given) + Path(pictures.__file__).read_text(encoding="utf-8")
        return f"<!-- made of {sha256(made_of.encode()).hexdigest()[:12]} -->"

    def svg(self) -> str:
        """Return the drawing."""
        return f"{self.draw(*self.given)}{self.mark}\n"


class _ByName(dict[str, str]):
    def __init__(self, found: Callable[[str], str]):
        self._found = found

    def __missing__(self, name: str) -> str:
        return self._found(name)


def shown(told: Mapping[str, Any], declared: Declared) -> str:
    """Return a fact as it is declared to be shown: as a factor, as so many times, or by a template."""
    show, value = declared.get("show", "factor"), told["value"]
    if value is None or isnan(value) or show not in ("factor", "times"):
        return Figure(told["metric"], show, factor=declared.get("scale", 1.0)).text(told)
    if show == "times":
        return f"{_short(value)}×"
    estimate = estimate_of(told)
    if estimate.low == estimate.high == 1:
        return "baseline"
    if estimate.low <= 1 <= estimate.high:
        return SAME
    return f"{_short(1 / value)}× faster" if value < 1 else f"{_short(value)}× slower"


def _short(value: float) -> str:
    """Return a factor with as many digits as a reader can use."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if round(value, 1) != 1 else f"{value:.2f}"


def _facts(results: Path, suite: str) -> pl.DataFrame:
    """Return all facts of a suite's records, with the title of the section that shows them, or of clients' programs."""
    records, clients = (results / suite / f"records.{kind}" for kind in ("jsonl", "csv"))
    if clients.exists():
        return table(told for client in _programs(clients) for told in _gains(client)).with_columns(section=pl.lit(""))
    if suite not in SUITES or not records.exists():
        raise FigureError(f"no records of a suite {suite!r} in {results}")
    return SuiteReport.of(suite, SUITES[suite], RecordFile(records).read()).facts


def _programs(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of other people's programs, those that gain most first."""
    with path.open(encoding="utf-8", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: -float(row["gain"]))


def _gains(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield what a row tells of a program with a line changed, beside the program as it was."""
    where = {"task": row["client"], "setting": row["case"], "row": row["span"], "threads": int(row["threads"])}
    gain, least, most = (float(row[name]) for name in ("gain", "gain_low", "gain_high"))
    yield fact("time", times("plain"), Estimate(1 / gain, 1 / most, 1 / least), **where)
    yield fact("peak memory", times("plain"), float(row["line_mib"]) / float(row["plain_mib"]), **where)


def written(text: str, figures: Figures, page: str) -> str:
    """Return the text of a page, of this path, with all that stands between markers made anew."""
    if len(_OPENING.findall(text)) != len(_MARKED.findall(text)):
        raise FigureError(f"{page}: a marker has no name, or no <!-- end --> behind it")

    def anew(found: re.Match[str]) -> str:
        opening, kind, name, end = found.groups()
        try:
            if kind != "chart":
                return f"{opening}{figures.of(kind, name)}{end}"
            place = os.path.relpath(f"{CHARTS}/{name}.svg", Path(page).parent).replace(os.sep, "/")
            return f"{opening}\n![{figures.alternative(name)}]({place})\n{end}"
        except FigureError as error:
            raise FigureError(f"{page}: {error}") from error

    return _MARKED.sub(anew, text)


def declarations() -> dict[str, Any]:
    """Return what `figures.toml` has."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def pages(root: Path) -> list[Path]:
    """Return the Markdown that may have markers."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def changes(figures: Figures, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield pages and charts that are out of date, and what they are to be."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        if (new := written(text, figures, page.relative_to(root).as_posix())) != text:
            yield page, new
    for name in figures.charts:
        path, picture = root / CHARTS / f"{name}.svg", figures.picture(name)
        if not path.exists() or picture.mark not in path.read_text(encoding="utf-8"):
            yield path, picture.svg()


def main() -> None:
    """Write, or check, all pages and charts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if something is out of date")
    old = dict(changes(Figures(declarations())))
    if old and parser.parse_args().check:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in old)
        sys.exit(f"Out of date: {names}. Write them anew: python benchmarks/scripts/figures.py")
    for path, new in old.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except FigureError as error:
        sys.exit(str(error))
