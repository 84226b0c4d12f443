"""Pytest plugin: tests with a recorded outcome for the same sources and device are not run again.

A process ends after some time, with exit code 2 if tests are left, so that an error of a device harms few of them. A
test in which the process has died twice is recorded as failed.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from progress import Progress


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
    """The outcomes of tests in a file.

    Args:
        path: the file.
        of: identifies what is tested; a file for anything else is overwritten.
        shard: seconds after which the process ends.
    """

    def __init__(self, path: Path, of: str, shard: float):
        self._progress, self._end = Progress(path, of), monotonic() + shard
        for test in sorted(self._progress.died_twice):
            self._progress.end(test, outcome="failed", said="The process has twice ended in this test.")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests with a recorded outcome."""
        done = [item for item in items if item.nodeid in self._progress.ended]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self._progress.ended]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins."""
        self._progress.begin(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test, and failures of its setup and teardown."""
        if report.when == "call" or not report.passed:
            said = "" if report.passed else report.longreprtext
            self._progress.end(report.nodeid, outcome=report.outcome, said=said)
            # No later test of this process can use the device.
            self._end = 0.0 if "CUDA error" in said else self._end

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """End the process after this test if its time is over and tests are left."""
        if nextitem is not None and monotonic() > self._end:
            item.session.shouldstop = "the shard's time is over"
