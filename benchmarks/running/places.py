"""Where a run finds its data and keeps its records, and on which devices it runs."""

from __future__ import annotations

import os
from pathlib import Path

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.records.environment import require
from gradfree.benchmarks.tasks.imported import names_a_function
from gradfree.cli import UsageError
from gradfree.wording import no_such

RECORDS = "records.jsonl"
_DEVICES = ("cpu", "cuda")


def loader_in(data: str | None) -> str | None:
    """Return what loads the data of a model of the user's own; set where those of tasks are, if ``data`` says that."""
    if data is None or names_a_function(data):
        return data
    # The workers inherit it.
    os.environ[DATA_ROOT] = data
    return None


def devices_in(names: str) -> tuple[str, ...]:
    """Return the devices.

    Raises:
        UsageError: one is unknown, or not there.
    """
    for name in (devices := tuple(names.split(","))):
        if name not in _DEVICES:
            raise UsageError(no_such("device", name, _DEVICES))
        require(name)
    return devices


def make_folder(folder: Path) -> None:
    """Make sure that there is such a folder.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}.") from error
