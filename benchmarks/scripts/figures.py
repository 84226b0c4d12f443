"""Write the figures, tables and charts of README and docs, each between markers, from committed records.

python benchmarks/scripts/figures.py [--check]

`figures.toml` says which record each one comes from. A page with figures also has `<!-- records: page -->`, for the
versions and commits that made its records. `--check` changes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import pictures
import polars as pl
from pictures import bars, lines, points

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
_OPENING = re.compile(r"<!-- (?:figure|table|chart|records): ")
_MARKED = re.compile(r"(<!-- (figure|table|chart|records): ([\w-]+) -->).*?(<!-- end -->)", re.DOTALL)
_PAGE = "page"
"""The name in the marker of all records of a page; other names are those of suites."""
_HOW = ("show", "scale", "heading", "suite", "section", "like")
"""Keys of a declared figure that are not columns of the facts."""
Declared = Mapping[str, Any]


class FigureError(Exception):
    """A figure's declaration is wrong, or no record contains it."""


class Figures:
    """The declarations of `figures.toml`.

    Args:
        declared: the contents of the file.
        results: the folder with one folder of records for each suite.
    """

    def __init__(self, declared: Declared, results: Path = ROOT / "benchmarks" / "results"):
        self._declared, self._results = declared, results
        self._facts = cache(partial(_facts, results))

    @property
    def charts(self) -> list[str]:
        """The names of all charts."""
        return list(self._declared.get("chart", ()))

    def of(self, kind: str, name: str) -> str:
        """Return the text between the markers of a figure or table."""
        makers: dict[str, Callable[[Declared], str]] = {"figure": self._figure, "table": self._table}
        try:
            found = makers[kind](self.declared(kind, name))
            if kind == "figure" and UNKNOWN in found:
                raise FigureError(f"its record has no value: {found}")
            return found
        except (FigureError, KeyError) as error:
            raise FigureError(f"[{kind}.{name}]: {error}") from error

    def declared(self, kind: str, name: str) -> Declared:
        """Return the declaration of a name, with the entries that it takes from another by `like`."""
        found = self._declared.get(kind, {}).get(name)
        if found is None:
            raise FigureError(f"{name} is not declared in figures.toml")
        return {**self.declared(kind, found["like"]), **found} if "like" in found else found

    def filled(self, text: str) -> str:
        """Return `text` with names in braces replaced by figures."""
        return text.format_map(_ByName(partial(self.of, "figure")))

    def _figure(self, declared: Declared) -> str:
        known = self.known(declared)
        if len(known) != 1:
            seen = "; ".join(str({name: value for name, value in row.items() if value is not None}) for row in known)
            raise FigureError(f"{len(known)} facts instead of one. {seen}")
        return shown(known[0], declared)

    def known(self, declared: Declared) -> list[dict[str, Any]]:
        """Return the facts that a declaration selects, without duplicate values."""
        facts = self._facts(declared["suite"])
        if "section" in declared:
            facts = facts.filter(pl.col("section").str.starts_with(declared["section"]))
        where = {name: value for name, value in declared.items() if name not in _HOW}
        found = select(facts, **where).unique(["at", "value", "low", "high"], maintain_order=True)
        return list(found.drop("section").iter_rows(named=True))

    def _table(self, declared: Declared) -> str:
        made = self._cells if "cells" in declared else self._programs if "each" in declared else self._selected
        cells = list(made(declared))
        for name, *found in (*cells[1:], *zip(*cells, strict=True)):
            if {*found} == {UNKNOWN}:
                raise FigureError(f"no record for {name!r}")
        head, *rows = [f"| {' | '.join(line)} |" for line in cells]
        labels = declared.get("labels", 1)
        aligned = "|" + "---|" * labels + "---:|" * (head.count(" | ") + 1 - labels)
        return "\n".join(["", head, aligned, *rows, ""])

    def _cells(self, declared: Declared) -> Iterator[list[str]]:
        yield declared["head"]
        for row in declared["cells"]:
            yield [self.filled(cell) for cell in row]

    def _programs(self, declared: Declared) -> Iterator[list[str]]:
        """Yield the table of other programs: one row each, with columns of its record, speed and memory."""
        yield declared["head"]
        for row in _programs(self._results / declared["suite"] / "records.csv"):
            if int(row["threads"]) != declared["threads"]:
                continue
            taken = {"suite": declared["suite"], "threads": declared["threads"]}
            where = {**taken, "task": row["client"], "setting": row["case"], "row": row["span"]}
            speed = self._figure({**where, "metric": "time"})
            memory = self._figure({**where, "metric": "peak memory", "show": "times"})
            yield [cell.format_map({**row, "speed": speed, "memory": memory}) for cell in declared["each"]]

    def _selected(self, declared: Declared) -> Iterator[list[str]]:
        """Yield a table whose rows and columns are declared by queries."""
        yield [declared["heading"], *(column["heading"] for column in declared["columns"])]
        for value, label in declared["rows"].items():
            found = [declared["where"] | {declared["by"]: value} | column for column in declared["columns"]]
            yield [label, *(self._figure(one) if self.known(one) else UNKNOWN for one in found)]

    def picture(self, name: str) -> Picture:
        """Return the picture of a chart."""
        declared = self.declared("chart", name)
        title = self.filled(declared["title"])
        if "bars" in declared:
            rivals = declared.get("rivals", ())
            found: Any = [{**self._bar(*bar), "rival": bar[0] in rivals} for bar in declared["bars"].items()]
            return Picture(bars, (title, found, declared["baseline"]))
        if "across" in declared:
            found = [{"label": label, **self._point(declared, row)} for row, label in declared["rows"].items()]
            return Picture(points, (title, found, declared["x"], declared["y"]))
        found = {label: self._line(declared, row) for row, label in declared["rows"].items()}
        return Picture(lines, (title, found, declared["x"], declared["y"], declared.get("scale", "log")))

    def _bar(self, label: str, name: str) -> dict[str, Any]:
        (known,) = self.known(self.declared("figure", name))
        return {"label": label, "value": 1 / known["value"], "text": self.of("figure", name)}

    def _line(self, declared: Declared, row: str) -> list[tuple[float, float]]:
        """Return the points of a row; with `step`, `at` is multiplied by the seconds of a step."""
        each = self.known({**declared["step"], "row": row})[0]["value"] if "step" in declared else 1.0
        return [(point["at"] * each, point["value"]) for point in self.known({**declared["where"], "row": row})]

    def _point(self, declared: Declared, row: str) -> dict[str, float]:
        """Return where a row's values of `across` and `up` meet, with the interval of the latter."""
        x, y = (self.known({**declared["where"], "row": row, **declared[axis]})[0] for axis in ("across", "up"))
        return {"x": x["value"], **{name: y[name] for name in ("value", "low", "high")}}

    def suites(self, kind: str, name: str) -> set[str]:
        """Return the suites whose records a figure, table or chart shows."""
        found, waiting = set[str](), [self.declared(kind, name)]
        while waiting:
            known = waiting.pop()
            found |= {known["suite"]} if "suite" in known else set()
            named = {*known.get("bars", {}).values(), *re.findall(r"\{([\w-]+)\}", str(known))}
            waiting += [self.declared("figure", name) for name in named & self._declared.get("figure", {}).keys()]
            waiting += [part for part in known.values() if isinstance(part, dict) and part is not known.get("bars")]
        return found

    def records(self, suite: str) -> str:
        """Return the versions of gradfree that made a suite's records, each with their number and the commits."""
        made = self._made(suite)
        versions = dict.fromkeys(sorted(version for version, _ in made))
        found = {version: {commit for known, commit in made if known == version} for version in versions}
        counts = {version: sum(count for (known, _), count in made.items() if known == version) for version in versions}
        return ", ".join(f"{version} ({_records_at(counts[version], found[version])})" for version in versions)

    def _made(self, suite: str) -> Counter[tuple[str, str]]:
        """Return how many records of a suite each version and commit made."""
        folder = self._results / suite
        if (clients := folder / "records.csv").exists():
            return Counter((row["gradfree"], "") for row in _programs(clients))
        if not (folder / "records.jsonl").exists():
            raise FigureError(f"no records of a suite {suite!r} in {self._results}")
        records = RecordFile(folder / "records.jsonl").read().values()
        environments = [record["environment"] for record in records]
        return Counter((made["gradfree"], (made["commit"] or "")[:7]) for made in environments)

    def alternative(self, name: str) -> str:
        """Return the alternative text of a chart."""
        declared = self.declared("chart", name)
        said = [f"{label}: {self.of('figure', figure)}" for label, figure in declared.get("bars", {}).items()]
        return ". ".join([self.filled(declared["title"]), *(["; ".join(said)] if said else [])])


def _records_at(count: int, commits: set[str]) -> str:
    """Return the number of records and the commit; of several commits their number."""
    known = sorted(commit for commit in commits if commit)
    at = f" at {known[0]}" if len(known) == 1 else f" at {len(known)} commits" if known else ""
    return f"{count} record{'s' * (count != 1)}{at}"


class Picture(NamedTuple):
    """A chart: the function that draws it, and its arguments."""

    draw: Callable[..., str]
    given: tuple[Any, ...]

    @property
    def mark(self) -> str:
        """A comment in the SVG with a digest of its inputs: the drawing itself depends on a machine's fonts."""
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


def shown(known: Mapping[str, Any], declared: Declared) -> str:
    """Return the text of a fact: as a factor "faster" or "slower", as a multiple, or by a template."""
    show, value = declared.get("show", "factor"), known["value"]
    if value is None or isnan(value) or show not in ("factor", "times"):
        return Figure(known["metric"], show, factor=declared.get("scale", 1.0)).text(known)
    if show == "times":
        return f"{_short(value)}×"
    estimate = estimate_of(known)
    if estimate.low == estimate.high == 1:
        return "baseline"
    if estimate.low <= 1 <= estimate.high or _short(value) == _short(1 / value) == "1.00":
        return SAME
    return f"{_short(1 / value)}× faster" if value < 1 else f"{_short(value)}× slower"


def _short(value: float) -> str:
    """Return a factor with the digits that matter to a reader."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if round(value, 1) != 1 else f"{value:.2f}"


def _facts(results: Path, suite: str) -> pl.DataFrame:
    """Return all facts of a suite's records with their sections' titles, or those of other programs."""
    records, clients = (results / suite / f"records.{kind}" for kind in ("jsonl", "csv"))
    if clients.exists():
        gains = (one for client in _programs(clients) for one in _gains(client))
        return table([*gains, *_rewards(clients.with_name("curves.csv"))]).with_columns(section=pl.lit(""))
    if suite not in SUITES or not records.exists():
        raise FigureError(f"no records of a suite {suite!r} in {results}")
    return SuiteReport.of(suite, SUITES[suite], RecordFile(records).read()).facts


def _programs(path: Path) -> list[dict[str, str]]:
    """Return the records of other programs, in the order of decreasing gain."""
    with path.open(encoding="utf-8", newline="") as file:
        return sorted(csv.DictReader(file), key=lambda row: -float(row["gain"]))


def _gains(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the time and memory of a program with an engine, as multiples of the unchanged program's."""
    where = {"task": row["client"], "setting": row["case"], "row": row["span"], "threads": int(row["threads"])}
    gain, least, most = (float(row[name]) for name in ("gain", "gain_low", "gain_high"))
    yield fact("time", times("plain"), Estimate(1 / gain, 1 / most, 1 / least), **where)
    yield fact("peak memory", times("plain"), float(row["line_mib"]) / float(row["plain_mib"]), **where)


def _rewards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the mean over seeds of the last rewards of both programs in each environment."""
    if path.exists():
        last = pl.read_csv(path, null_values="nan").group_by("environment", "seed", maintain_order=True).last()
        for (environment,), runs in last.group_by("environment", maintain_order=True):
            for row in ("as it is", "run_with_resets"):
                yield fact("last reward", "1", Estimate.of(runs[row].to_list()), task=environment, row=row)


def written(text: str, figures: Figures, page: str) -> str:
    """Return the text of a page with everything between markers written again; `page` is its path."""
    if len(_OPENING.findall(text)) != len(_MARKED.findall(text)):
        raise FigureError(f"{page}: a marker has no name, or no <!-- end --> after it")

    marked = [(kind, name) for _, kind, name, _ in _MARKED.findall(text)]
    shown_here = [one for one in marked if one[0] != "records"]
    if shown_here and ("records", _PAGE) not in marked:
        raise FigureError(f"{page}: figures need the marker <!-- records: {_PAGE} --><!-- end --> on their page")

    def records(name: str) -> str:
        if name != _PAGE:
            return figures.records(name)
        suites = sorted({suite for kind, name in shown_here for suite in figures.suites(kind, name)})
        return "; ".join(f"`{suite}` gradfree {figures.records(suite)}" for suite in suites)

    def replacement(found: re.Match[str]) -> str:
        opening, kind, name, end = found.groups()
        try:
            if kind == "records":
                return f"{opening}{records(name)}{end}"
            if kind != "chart":
                return f"{opening}{figures.of(kind, name)}{end}"
            place = os.path.relpath(f"{CHARTS}/{name}.svg", Path(page).parent).replace(os.sep, "/")
            return f"{opening}\n![{figures.alternative(name)}]({place})\n{end}"
        except FigureError as error:
            raise FigureError(f"{page}: {error}") from error

    return _MARKED.sub(replacement, text)


def declarations() -> dict[str, Any]:
    """Return the contents of `figures.toml`."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def pages(root: Path) -> list[Path]:
    """Return the Markdown files that may have markers."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def changes(figures: Figures, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield the pages and charts that are out of date, with their new contents."""
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
        sys.exit(f"Out of date: {names}. Write them again: python benchmarks/scripts/figures.py")
    for path, new in old.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except FigureError as error:
        sys.exit(str(error))
