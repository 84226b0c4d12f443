"""``gradfree bench`` on the command line; light to import, as every ``gradfree`` command imports it."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gradfree.benchmarks.extra import needs_extra
from gradfree.cli import UsageError


def run(
    suite: str = "quick",
    out: Path | None = None,
    seeds: int = 3,
    device: Literal["cpu", "cuda"] = "cpu",
    jobs: int = os.cpu_count() or 1,
    data: Path | None = None,
) -> None:
    """Train with every engine of a suite, time the steps, and report.

    Records are kept as they come. Started again, the command does only what is missing.

    Args:
        suite: the comparisons to make. "quick" takes two to three minutes on two cores, "rnn" twenty, "scan" one,
            "lightning" two, "text" an hour.
        out: folder for records, table and plot; results/<suite> if not given.
        seeds: training runs for each engine and task.
        device: where to train.
        jobs: training runs at a time; as many as cores if not given.
        data: folder of the data sets that "text" needs, one folder each; $GRADFREE_DATA if not given.
    """
    for option, value in ("seeds", seeds), ("jobs", jobs):
        if value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}.")
    _session().run(suite, out, seeds, device, jobs, data)


def report(suite: str = "quick", out: Path | None = None) -> None:
    """Print the tables of the records that are there; write a page, Markdown with a picture, CSV and Parquet.

    Args:
        suite: the comparisons to show.
        out: folder of the records, and for the report; results/<suite> if not given.
    """
    _session().report(suite, out)


def compare(a: Path, b: Path) -> None:
    """Print what changed between two sets of results, say of two commits or machines.

    Args:
        a: folder or file of records.
        b: another.
    """
    _session().compare(a, b)


COMMANDS: dict[str, Any] = {
    "_help": "Compare engines in speed, memory and accuracy on real data.",
    "run": run,
    "report": report,
    "compare": compare,
}


def _session() -> ModuleType:
    """Import what needs the extra's packages."""
    with needs_extra():
        from gradfree.benchmarks import session
    return session
