"""What a run is to do, where, having its cases run, and keeping their records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.environment import require
from gradfree.benchmarks.records.records import Record, RecordFile
from gradfree.benchmarks.running.workers import Executor
from gradfree.benchmarks.tables.experiment import Suite, grouped_cases
from gradfree.benchmarks.tasks.imported import names_a_function
from gradfree.cli import UsageError

RECORDS = "records.jsonl"
Wanted = Callable[[Mapping[str, Record]], Iterable[Case | None]]
"""Yields all cases, given the records so far by case id; ``None`` for one that waits for more of them."""


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


@dataclass(frozen=True)
class Shard:
    """One share of the cases, of several equal ones.

    Attributes:
        number: which, from 1.
        count: of all shares.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``"1/4"``.

        Raises:
            UsageError: ``text`` is none of the shares.
        """
        numbers = re.fullmatch(r"(\d+)/(\d+)", text)
        shard = cls(*map(int, numbers.groups())) if numbers else cls(0, 0)
        if not 1 <= shard.number <= shard.count:
            raise UsageError(f"--shard counts from 1: 1/4, 2/4, 3/4 and 4/4, say, not {text}.")
        return shard

    def __str__(self) -> str:
        """Return what file names have."""
        return f"{self.number}-of-{self.count}" if self.count > 1 else ""


@dataclass(frozen=True)
class Plan:
    """The cases of a run.

    Attributes:
        suite: the comparisons.
        seeds: training runs of each.
        devices: where.
        shard: the share to run.
    """

    suite: Suite
    seeds: int
    devices: tuple[str, ...]
    shard: Shard = Shard()

    def cases(self, records: Mapping[str, Record]) -> Iterator[Case | None]:
        """Yield the shard's cases; ``None`` for one that is not settled before ``records`` has all trials.

        Whatever waits for trials is on the same shard as they are: no shard needs the others' records.
        """
        numbers: dict[Hashable, int] = {}
        for device in self.devices:
            for group, case in grouped_cases(self.suite, self.seeds, device, records):
                number = numbers.setdefault((device, group), len(numbers))
                if number % self.shard.count == self.shard.number - 1:
                    yield case


def run_cases(wanted: Wanted, file: RecordFile, executor: Executor, retry: bool = False) -> None:
    """Run what is wanted and add each record to ``file`` as soon as it is there, also of cases that fail.

    Args:
        wanted: the cases.
        file: has the records of finished cases, which are not run, and takes the new ones.
        executor: runs them.
        retry: whether cases whose record is a failure are run again.

    Raises:
        UsageError: a record cannot be written; those before are kept.
    """
    records = file.read()
    finished = finished_in(records, retry)
    with file.reserved(), _progress(count_finished(wanted(records), finished)) as progress:
        while True:
            cases = list(wanted(records))
            progress.total, progress.n = len(cases), count_finished(cases, finished)
            running = {case.id: case for case in _next_batch(cases, finished)}
            if not running:
                break
            progress.set_postfix_str(_describe(running, executor.jobs))
            with closing(executor.run(list(running.values()))) as outcomes:
                for record in outcomes:
                    if record["case"] not in running:
                        raise UsageError("code was changed while it was run; start the command again.")
                    file.append(record)
                    records[record["case"]] = record
                    finished.add(record["case"])
                    del running[record["case"]]
                    progress.update()
                    progress.set_postfix_str(_describe(running, executor.jobs))


def finished_in(records: Mapping[str, Record], retry: bool) -> set[str]:
    """Return the ids of the cases that need not be run, with ``retry`` but for those that failed."""
    return {name for name, record in records.items() if not (retry and "error" in record)}


def count_finished(cases: Iterable[Case | None], finished: Collection[str]) -> int:
    """Return how many of ``cases`` are in ``finished``."""
    return sum(case is not None and case.id in finished for case in cases)


def _next_batch(cases: Sequence[Case | None], finished: Collection[str]) -> list[Case]:
    """Return the missing cases that may run side by side or, when there are none, one that must run alone."""
    missing = [case for case in cases if case is not None and case.id not in finished]
    return [case for case in missing if not case.alone] or missing[:1]


def _describe(running: Mapping[str, Case], jobs: int) -> str:
    """Name the first ``jobs`` cases: the others wait for a worker."""
    return ", ".join(f"{case.topic} {case.subject}" for case in islice(running.values(), jobs))


def _progress(done: int) -> tqdm[None]:
    """Return a bar on the terminal; ``done`` cases took no time."""
    # Cases differ in length: estimate from all of them.
    return tqdm(initial=done, unit="case", smoothing=0, dynamic_ncols=True)
