"""Pytest plugin: tests with a recorded outcome for the same sources and device are not run again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record`` and ``--record-of``."""
    parser.addoption("--record", type=Path, required=True, help="file of outcomes, one line a test")
    parser.addoption(
        "--record-of", required=True, help="identifies what is tested; outcomes for anything else are dropped"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Open the record."""
    config.pluginmanager.register(Record(config.getoption("record"), config.getoption("record_of")))


class Record:
    """A file of outcomes, whose first line identifies what was tested.

    Args:
        path: the file.
        of: identifies what is tested; a file for anything else is overwritten.
    """

    def __init__(self, path: Path, of: str):
        outcomes = read(path, of)
        self._known = {outcome["test"] for outcome in outcomes}
        self._file = path.open("w", encoding="utf-8")
        for line in ({"of": of}, *outcomes):
            self._write(line)

    def _write(self, line: dict[str, str]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests with a recorded outcome."""
        done = [item for item in items if item.nodeid in self._known]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self._known]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test, and failures of its setup and teardown."""
        if report.when == "call" or not report.passed:
            said = "" if report.passed else report.longreprtext
            self._write({"test": report.nodeid, "outcome": report.outcome, "said": said})


def read(path: Path, of: str) -> list[dict[str, str]]:
    """Return the outcomes in ``path`` if they are for ``of``, without incomplete lines."""
    outcomes = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            outcomes.append(json.loads(line))
    return outcomes[1:] if outcomes[:1] == [{"of": of}] else []
