"""Compiled against eager autograd, in a separate process that can be killed: compiling has no time limit."""

from __future__ import annotations

import copy
import multiprocessing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from gradfree.benchmarks.advice.contest import Contestant
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.timing.side_by_side import interleaved, mean_seconds, statistics

LABEL = "torch.compile"
_WARM_UP = 3


def compiled_cost(job: Job, threads: int, seconds: float) -> dict[str, Any] | str:
    """Return the times of a compiled step and their ratios to an eager step's, or why there are none.

    Args:
        job: the model and its data.
        threads: number of threads of torch.
        seconds: time limit of compiling and timing.
    """
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe(duplex=False)
    # A copy without the job's cached batches.
    process = spawning.Process(target=_time, args=(there, replace(job), threads), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return f"not compiled within {seconds:.0f} s"
        found: dict[str, Any] | str = here.recv()
        return found
    except EOFError:
        return "the process that compiled it died"
    finally:
        process.kill()
        process.join()


def _time(there: Connection, job: Job, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        model = job.build()
        compiled = copy.deepcopy(model)
        compiled.compile()
        steps = [Contestant.of(BACKPROP, model, job).step, Contestant.of(BACKPROP, compiled, job).step]
        for step in steps:
            for _ in range(_WARM_UP):
                step(job.batches[0])
        times = interleaved([partial(mean_seconds, partial(step, job.batches[0])) for step in steps])
    except Exception as error:
        there.send(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    else:
        there.send(statistics(times[1], times[0]))
