"""A run: planning its cases, running those without a record, and storing their records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing

from tqdm import tqdm

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record, RecordFile
from gradfree.benchmarks.running.workers import Executor
from gradfree.cli import UsageError

RECORDS = "records.jsonl"
PlannedCases = Callable[[Mapping[str, Record]], Iterable[Case | None]]
"""Yields all cases, given the records so far by case id; ``None`` for a case that depends on missing records."""


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
    done = count_finished(planned(records), finished)
    # Cases differ in length, so the remaining time is estimated from all of them.
    with file.reserved(), tqdm(initial=done, unit="case", smoothing=0, dynamic_ncols=True) as progress:
        while True:
            every = list(planned(records))
            progress.total, progress.n = len(every), count_finished(every, finished)
            missing = [case for case in every if case is not None and case.id not in finished]
            # All that may run in parallel or, if there are none, one that must run alone.
            running = {case.id: case for case in [case for case in missing if not case.alone] or missing[:1]}
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
                    case = running.pop(record["case"])
                    if words := "" if "error" in record else case.outcome(record["results"]):
                        progress.write(f"{case}, seed {case.seed}: {words}")
                    progress.update()
                    progress.set_postfix_str(_describe(running))


def finished_in(records: Mapping[str, Record], retry: bool) -> set[str]:
    """Return the ids of the cases that need not run; with ``retry``, failed cases are not among them."""
    return {name for name, record in records.items() if not (retry and "error" in record)}


def count_finished(cases: Iterable[Case | None], finished: Collection[str]) -> int:
    """Return how many of ``cases`` are in ``finished``."""
    return sum(case is not None and case.id in finished for case in cases)


def _describe(running: Mapping[str, Case]) -> str:
    """Return the name of the first case that is not finished, which may wait for a worker."""
    return next(map(str, running.values()), "")
