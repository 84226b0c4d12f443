"""Running each case in a separate process on this machine."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from math import inf
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from time import monotonic

import torch

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record, attempt, failure

PRELOADED = [
    "gradfree.benchmarks.suites.index",
    "gradfree.benchmarks.tasks.own_metrics",
    "gradfree.algorithms",
    "gradfree.models",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch._dynamo",  # which the first optimizer imports
]
"""Modules imported once in the fork server: importing them in each worker would take seconds."""


Executor = Callable[[Sequence[Case]], Generator[Record, None, None]]
"""Runs cases, each in a new process; yields their records in the order of completion, failed ones included. The rest is
stopped when it is closed."""


_is_worker = False
"""Whether this process was started to run a case."""


def run_here(cases: Sequence[Case], jobs: int = 1, limit: float = inf) -> Generator[Record, None, None]:
    """Run up to ``jobs`` cases in parallel: an :data:`Executor`. A case that takes ``limit`` seconds fails."""
    waiting = iter(cases)
    running: dict[Connection, tuple[BaseProcess, Case, float]] = {}
    try:
        while True:
            for case in islice(waiting, jobs - len(running)):
                receiver, process = _start(case)
                running[receiver] = process, case, monotonic() + limit
            if not running:
                return
            first = min(end for *_, end in running.values())
            ready = wait(list(running), None if first == inf else max(0.0, first - monotonic()))
            for receiver in [receiver for receiver in running if receiver in ready]:
                process, case, _ = running.pop(receiver)
                yield _receive(receiver, process, case)
            for receiver in [receiver for receiver, (*_, end) in running.items() if end <= monotonic()]:
                process, case, _ = running.pop(receiver)
                process.kill()
                yield failure(case, f"too long: it was not done after {limit:.0f} s")
    finally:
        for process, *_ in running.values():
            process.kill()


def _start(case: Case) -> tuple[Connection, BaseProcess]:
    context = _context_for(case.device)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, sender, dict(os.environ)))
    process.start()
    # Close this end, or the death of the worker would go unnoticed.
    sender.close()
    return receiver, process


def _context_for(device: str) -> ForkContext | ForkServerContext | SpawnContext:
    """Return how a process for a case on ``device`` is started.

    Forked processes have everything imported already. Forking is reliable only on Linux, and CUDA refuses to work in a
    forked process if the first one has asked for a device. A worker forks its own processes, since a second fork server
    would import everything again. It must do so before it computes: the threads of a computation are not in the fork.
    """
    if sys.platform != "linux" or torch.device(device).type != "cpu":
        return get_context("spawn")
    if _is_worker:
        return get_context("fork")
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _receive(receiver: Connection, process: BaseProcess, case: Case) -> Record:
    try:
        record: Record = receiver.recv()
    except EOFError:
        process.join()
        return failure(case, _cause_of_death(process.exitcode or 0))
    process.join()
    return record


def _cause_of_death(exitcode: int) -> str:
    if exitcode >= 0:
        return f"the process ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = ": the system does so when memory runs out" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"


def _work(case: Case, sender: Connection, environ: Mapping[str, str]) -> None:
    """Run ``case`` and send its record."""
    global _is_worker
    _is_worker = True
    # The fork server may have started with another environment.
    os.environ.update(environ)
    # Ctrl-C reaches the whole process group, but the parent stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    prepare()
    sender.send(attempt(case))


def prepare() -> None:
    """Prepare this process for running a case."""
    # One thread, so that results do not depend on the machine's number of cores.
    torch.set_num_threads(1)
    # Exclude imported objects from garbage collection: scanning them before a memory measurement takes 0.3 s.
    gc.freeze()


def _exit_with_parent() -> None:
    """Exit this process when its parent is killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
