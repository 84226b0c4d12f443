"""Running cases in worker processes and keeping their records."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradfree.benchmarks.case import Case
from gradfree.benchmarks.records import RecordFile, measure


def run_cases(cases: Sequence[Case], finished: int, file: RecordFile, jobs: int) -> None:
    """Run ``cases``, up to ``jobs`` at a time, and add each record to ``file`` as soon as it is there.

    Args:
        cases: what to run; those that must run alone come last, one by one.
        finished: how many more the progress bar counts as done.
        file: takes the records.
        jobs: number of worker processes.

    Raises:
        RuntimeError: a case failed; the records of the finished ones are kept.
    """
    together = [case for case in cases if not case.alone]
    batches = [together, *([case] for case in cases if case.alone)]
    workers = max(1, min(jobs, len(together)))
    with _progress() as progress, _pool(workers) as pool:
        bar = progress.add_task("", total=finished + len(cases), completed=finished)
        for batch in batches:
            running = {pool.submit(measure, case): case for case in batch}
            progress.update(bar, description=_describe(list(running.values())[:workers]))
            for future in as_completed(list(running)):
                case = running.pop(future)
                try:
                    file.append(future.result())
                except Exception as error:
                    raise RuntimeError(f"the case {case.id!r} failed") from error
                progress.update(bar, advance=1, description=_describe(list(running.values())[:workers]))


def _describe(cases: Sequence[Case]) -> str:
    return ", ".join(f"{case.topic} {case.subject}" for case in cases)


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
