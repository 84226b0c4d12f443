"""Write the tables of engines and features as Markdown; takes some minutes.

python benchmarks/scripts/features_page.py --out docs/reference/support.md

Every feature is tried with every installed engine. If one neither works nor is refused, nothing is written.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import frameworks.features  # noqa: F401, registers more of them

from gradfree.algorithms.dsf import DSF
from gradfree.engines.engine import Engine
from gradfree.registry import create_engine, list_engines
from gradfree.testing.cases.cases import CASES, FAMILIES, STANDING_FOR, ModelCase
from gradfree.testing.conformance import BASIC
from gradfree.testing.features.feature import FEATURES, Feature

CHAINS = "Chains"
"""Title of the table of all chains; each family has another table."""

_INTRODUCTION = """# What works with which engine

Each row was tried with each engine above its table, at default options (`dsf` with `feedback="linspace"`: the mean of a
gate changes from pass to pass). It works, unless the engine stands in the second column: that engine raises
`ChainError`, [with these messages](#why-refused). *Works* means: the result is that of the same engine without the
feature. [What the rows mean](#what-the-rows-mean).

Made by `python benchmarks/scripts/features_page.py --out docs/reference/support.md`.
"""


def default_engines() -> dict[str, Engine]:
    """Return every installed engine by name, at default options.

    `dsf` with the paper's ramp: the running mean of a gate is another in each pass, and so are its gradients.
    """
    return {name: create_engine(name) for name in list_engines()} | {"dsf": DSF(feedback="linspace")}


class Unclear(Exception):
    """Cells that neither work nor are refused; the message names them."""


@dataclass(frozen=True)
class Table:
    """One table: engines, and features or chains.

    Attributes:
        title: the table's title.
        engines: names of the engines.
        rows: by label, for each engine ``None`` if it works, else the message of the refusal.
    """

    title: str
    engines: list[str]
    rows: dict[str, list[str | None]] = field(default_factory=dict)

    def __str__(self) -> str:
        def refusing(cells: list[str | None]) -> str:
            names = [f"`{name}`" for name, cell in zip(self.engines, cells, strict=True) if cell is not None]
            return "all" if len(names) == len(self.engines) else ", ".join(names)

        refused = {label: names for label, cells in self.rows.items() if (names := refusing(cells))}
        works = "; ".join(label for label in self.rows if label not in refused)
        return "\n".join(
            [
                f"## {self.title}",
                "",
                f"Engines: {', '.join(f'`{name}`' for name in self.engines)}.",
                "",
                *([f"With all of them: {works}.", ""] if works else []),
                "| | refused by |",
                "|---|---|",
                *(f"| {label} | {names} |" for label, names in refused.items()),
                "",
            ]
        )


_LIST = re.compile(r"It knows, in their plain forms: [^.]*\. ")
_PLACE = re.compile(r"'(blocks|layer)[\w.]*'|\bblocks(\.\w+)+|^layer\b")
_CLASS = re.compile(r"(?<=… is )(an?|of class) \w+(?=, (but|which))")


def shown(message: str) -> str:
    """Return the first problem that ``message`` lists, or the whole message, without names of the model."""
    _, *problems = message.splitlines()
    return _CLASS.sub(r"\1 …", _PLACE.sub("…", _LIST.sub("", problems[0].removeprefix("- ") if problems else message)))


def reasons(tables: list[Table]) -> list[str]:
    """Return each message, with the engines that raise it."""
    said: dict[str, dict[str, None]] = {}
    for table in tables:
        for cells in table.rows.values():
            for name, cell in zip(table.engines, cells, strict=True):
                if cell is not None:
                    said.setdefault(shown(cell), {})[f"`{name}`"] = None
    return [f"- {', '.join(names)}: {message}" for message, names in said.items()]


def make_tables(engines: Mapping[str, Engine], say: Callable[[str], None] = lambda _: None) -> list[Table]:
    """Try every chain and feature with all engines.

    Args:
        engines: the engines by name.
        say: called with what is tried next.

    Raises:
        Unclear: some cells neither work nor are refused.
    """
    unclear: list[str] = []

    def row(feature: Feature, case: ModelCase, names: list[str]) -> list[str | None]:
        say(f"{feature.name}: {case.name}")
        return [_cell(feature, case, name, engines[name], unclear) for name in names]

    chains = Table(CHAINS, list(engines))
    for case in CASES:
        chains.rows[case.name] = row(BASIC, case, chains.engines)
    tables = [chains]
    for family in FAMILIES:
        case = STANDING_FOR[family]
        taking = [name for name, cell in zip(engines, chains.rows[case.name], strict=True) if cell is None]
        table = Table(f"On {family}: {case.name}", taking)
        for feature in FEATURES.values():
            if case in feature.cases:
                table.rows[feature.name] = row(feature, case, taking)
        tables.append(table)
    if unclear:
        raise Unclear("\n".join(["these neither work nor are refused:", *unclear]))
    return tables


def markdown(tables: list[Table]) -> str:
    """Return the page."""
    meanings = [f"- **{feature.name}**: {_meaning(feature)}" for feature in FEATURES.values()]
    refused = ["## Why refused", "", *reasons(tables), ""]
    return "\n".join([_INTRODUCTION, *map(str, tables), *refused, "## What the rows mean", "", *meanings, ""])


def _cell(feature: Feature, case: ModelCase, name: str, engine: Engine, unclear: list[str]) -> str | None:
    try:
        return feature.refusal(engine, case)
    except Exception as error:
        unclear.append(f"- {feature.name}, {case.name}, {name}: {type(error).__name__}: {error}")
        return None


def _meaning(feature: Feature) -> str:
    return (inspect.getdoc(feature.check) or "").replace("``", "`").replace("\n\n", " ").replace("\n", " ")


def _say(what: str) -> None:
    print(what, file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write the page to")
    path = parser.parse_args().out
    path.write_text(markdown(make_tables(default_engines(), _say)), "utf-8")
