"""Running cases in worker processes and keeping their records."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradfree.benchmarks.case import Case
from gradfree.benchmarks.records import Record, RecordFile, measure


def run_cases(wanted: Callable[[Mapping[str, Record]], Iterable[Case | None]], file: RecordFile, jobs: int) -> None:
    """Run what is wanted, up to ``jobs`` at a time, and add each record to ``file`` as soon as it is there.

    Args:
        wanted: yields all cases, given the records so far by case id; ``None`` for one that waits for more of them.
        file: has the records of finished cases, which are not run, and takes the new ones.
        jobs: number of worker processes.

    Raises:
        RuntimeError: a case failed; the records of the finished ones are kept.
    """
    records = file.read()
    with _progress() as progress, _pool(jobs) as pool:
        bar = progress.add_task("")
        while True:
            cases = list(wanted(records))
            progress.update(bar, total=len(cases), completed=count_finished(cases, records))
            running = {pool.submit(measure, case): case for case in _next_batch(cases, records)}
            if not running:
                break
            progress.update(bar, description=_describe(running, jobs))
            for future in as_completed(list(running)):
                case = running.pop(future)
                try:
                    records[case.id] = future.result()
                    file.append(records[case.id])
                except Exception as error:
                    raise RuntimeError(f"the case {case.id!r} failed") from error
                progress.update(bar, advance=1, description=_describe(running, jobs))


def count_finished(cases: Iterable[Case | None], records: Mapping[str, Record]) -> int:
    """Return how many of ``cases`` have a record."""
    return sum(case is not None and case.id in records for case in cases)


def _next_batch(cases: Sequence[Case | None], records: Mapping[str, Record]) -> list[Case]:
    """Return the cases without a record that may run side by side or, when there are none, one that must run alone."""
    missing = [case for case in cases if case is not None and case.id not in records]
    return [case for case in missing if not case.alone] or missing[:1]


def _describe(running: Mapping[Any, Case], jobs: int) -> str:
    """Name the first ``jobs`` cases: the others wait for a worker."""
    return ", ".join(f"{case.topic} {case.subject}" for case in islice(running.values(), jobs))


def _progress() -> Progress:
    return Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        # Cases differ in length: estimate from all of them.
        speed_estimate_period=3600,
    )


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes; should anything go wrong, or Ctrl-C be pressed, do not wait for them."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker) as pool:
        try:
            yield pool
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise


def _prepare_worker() -> None:
    # One thread each: the results of a case do not depend on the machine's number of cores.
    torch.set_num_threads(1)
    # torch 2.13's profiler, which counts memory, announces itself on stderr below this level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Ctrl-C reaches the whole process group, but stopping the workers is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent was killed: it would wait for cases for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
