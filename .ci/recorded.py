"""Pytest plugin: tests with a recorded outcome for the same sources and device are not run again.

A process ends after some time, with exit code 2 if tests are left, so that an error of a device harms few of them. A
test in which the process has died twice is recorded as failed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--record`` and ``--record-of``."""
    parser.addoption("--record", type=Path, required=True, help="file of outcomes, one line a test")
    parser.addoption(
        "--record-of", required=True, help="identifies what is tested; outcomes for anything else are dropped"
    )
    parser.addoption("--shard", type=float, default=60.0, help="seconds after which the process ends")


def pytest_configure(config: pytest.Config) -> None:
    """Open the record."""
    config.pluginmanager.register(Record(*map(config.getoption, ("record", "record_of", "shard"))))


class Record:
    """A file of outcomes, whose first line identifies what was tested.

    Args:
        path: the file.
        of: identifies what is tested; a file for anything else is overwritten.
        shard: seconds after which the process ends.
    """

    def __init__(self, path: Path, of: str, shard: float):
        lines = _lines(path, of)
        self._known = {line["test"] for line in lines if "test" in line}
        self._end = monotonic() + shard
        self._file = path.open("w", encoding="utf-8")
        for line in ({"of": of}, *lines):
            self._write(line)
        begun = [line["begun"] for line in lines if "begun" in line]
        for test in sorted({test for test in begun if begun.count(test) > 1} - self._known):
            self._known.add(test)
            self._write({"test": test, "outcome": "failed", "said": "The process has twice ended in this test."})

    def _write(self, line: dict[str, str]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests with a recorded outcome."""
        done = [item for item in items if item.nodeid in self._known]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self._known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins."""
        self._write({"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test, and failures of its setup and teardown."""
        if report.when == "call" or not report.passed:
            said = "" if report.passed else report.longreprtext
            self._write({"test": report.nodeid, "outcome": report.outcome, "said": said})
            # No later test of this process can use the device.
            self._end = 0.0 if "CUDA error" in said else self._end

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End the process after this test if its time is over and tests are left."""
        if nextitem is not None and monotonic() > self._end:
            item.session.shouldstop = "the shard's time is over"


def read(path: Path, of: str) -> list[dict[str, str]]:
    """Return the outcomes in ``path`` if they are for ``of``."""
    return [line for line in _lines(path, of) if "test" in line]


def _lines(path: Path, of: str) -> list[dict[str, str]]:
    """Return the lines of outcomes and of begun tests in ``path`` if they are for ``of``, without incomplete ones."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines[1:] if lines[:1] == [{"of": of}] else []
