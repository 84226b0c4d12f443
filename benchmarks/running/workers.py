"""Running each case in a process of its own, on this machine."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Protocol

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
"""What most cases import, torchmetrics above all, takes seconds: once, not in each worker."""


class Executor(Protocol):
    """What runs cases, each in a fresh process.

    Attributes:
        jobs: how many run at a time.
    """

    jobs: int

    def run(self, cases: Sequence[Case]) -> Generator[Record, None, None]:
        """Yield the records of ``cases`` as they are finished, also of those that fail; once closed, stop the rest."""


class Workers:
    """Up to ``jobs`` processes at a time."""

    def __init__(self, jobs: int):
        self.jobs = jobs

    def run(self, cases: Sequence[Case]) -> Generator[Record, None, None]:
        """Yield the records of ``cases`` as they are finished."""
        waiting = iter(cases)
        running: dict[Connection, tuple[BaseProcess, Case]] = {}
        try:
            while True:
                for case in islice(waiting, self.jobs - len(running)):
                    receiver, process = _start(case)
                    running[receiver] = process, case
                if not running:
                    return
                ready = wait(list(running))
                for receiver in [receiver for receiver in running if receiver in ready]:
                    yield _receive(receiver, *running.pop(receiver))
        finally:
            for process, _ in running.values():
                process.kill()


def _start(case: Case) -> tuple[Connection, BaseProcess]:
    # Processes that start with everything imported are there at once; only Linux forks without trouble.
    context: ForkServerContext | SpawnContext
    context = get_context("forkserver") if sys.platform == "linux" else get_context("spawn")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(case, sender, dict(os.environ)))
    process.start()
    # Ours must be closed for the end of the worker to be seen.
    sender.close()
    return receiver, process


def _receive(receiver: Connection, process: BaseProcess, case: Case) -> Record:
    try:
        record: Record = receiver.recv()
    except EOFError:
        process.join()
        return failure(case, _epitaph(process.exitcode or 0))
    process.join()
    return record


def _epitaph(exitcode: int) -> str:
    if exitcode >= 0:
        return f"the process ended with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    hint = ": the system does so when memory runs out" if name == "SIGKILL" else ""
    return f"the process was killed by {name}{hint}"


def _work(case: Case, sender: Connection, environ: Mapping[str, str]) -> None:
    """Run ``case`` and send the record."""
    # The server that processes are forked from may have started with another environment.
    os.environ.update(environ)
    # Ctrl-C reaches the whole process group, but stopping the workers is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare()
    sender.send(attempt(case))


def prepare() -> None:
    """Make a process ready to run a case."""
    # One thread each: the results of a case do not depend on the machine's number of cores.
    torch.set_num_threads(1)
    # What is imported is no garbage: to look for some there, before memory is measured, takes a third of a second.
    gc.freeze()


def _end_with_parent() -> None:
    """End this process when its parent was killed."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
