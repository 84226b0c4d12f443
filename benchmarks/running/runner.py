"""A run: planning its cases, running those without a record, and storing their records."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record, RecordFile
from gradfree.benchmarks.running.workers import Executor
from gradfree.benchmarks.tasks.imported import names_a_function
from gradfree.cli import UsageError

RECORDS = "records.jsonl"
PlannedCases = Callable[[Mapping[str, Record]], Iterable[Case | None]]
"""Yields all cases, given the records so far by case id; ``None`` for a case that depends on missing records."""


def parse_data(data: str | None) -> str | None:
    """Return ``data`` if it is ``module:function``, the loader for the user's model; else set the data folder to it."""
    if data is None or names_a_function(data):
        return data
    # Worker processes inherit it.
    os.environ[DATA_ROOT] = data
    return None


def make_folder(folder: Path) -> None:
    """Create the folder if it does not exist.

    Raises:
        UsageError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror}.") from error


def run_cases(planned: PlannedCases, file: RecordFile, executor: Executor, retry: bool = False) -> None:
    """Run the cases that have no record; append each record to ``file`` on completion, also those of failed cases.

    Args:
        planned: yields the cases.
        file: the records.
        executor: runs the cases.
        retry: whether failed cases are run again.

    Raises:
        UsageError: a record cannot be written; earlier records are kept.
    """
    records = file.read()
    finished = finished_in(records, retry)
    with file.reserved(), _progress(count_finished(planned(records), finished)) as progress:
        while True:
            every = list(planned(records))
            progress.total, progress.n = len(every), count_finished(every, finished)
            running = {case.id: case for case in _next_batch(every, finished)}
            if not running:
                break
            progress.set_postfix_str(_describe(running))
            with closing(executor(list(running.values()))) as outcomes:
                for record in outcomes:
                    if record["case"] not in running:
                        raise UsageError("the code was changed during the run; start the command again.")
                    file.append(record)
                    records[record["case"]] = record
                    finished.add(record["case"])
                    del running[record["case"]]
                    progress.update()
                    progress.set_postfix_str(_describe(running))


def finished_in(records: Mapping[str, Record], retry: bool) -> set[str]:
    """Return the ids of the cases that need not run; with ``retry``, failed cases are not among them."""
    return {name for name, record in records.items() if not (retry and "error" in record)}


def count_finished(cases: Iterable[Case | None], finished: Collection[str]) -> int:
    """Return how many of ``cases`` are in ``finished``."""
    return sum(case is not None and case.id in finished for case in cases)


def _next_batch(cases: Sequence[Case | None], finished: Collection[str]) -> list[Case]:
    """Return all missing cases that may run in parallel or, if there are none, one that must run alone."""
    missing = [case for case in cases if case is not None and case.id not in finished]
    return [case for case in missing if not case.alone] or missing[:1]


def _describe(running: Mapping[str, Case]) -> str:
    """Return the name of the first case that is not finished, which may wait for a worker."""
    return next((f"{case.topic} {case.subject}" for case in running.values()), "")


def _progress(done: int) -> tqdm[None]:
    """Return a progress bar that starts at ``done`` cases."""
    # Cases differ in length, so the remaining time is estimated from all of them.
    return tqdm(initial=done, unit="case", smoothing=0, dynamic_ncols=True)
