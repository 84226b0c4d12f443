"""Running each case in a separate process on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from typing import Any

import ray
import torch

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record, attempt, failure
from gradfree.benchmarks.running.workers import prepare


def run_on_ray(cases: Sequence[Case]) -> Generator[Record, None, None]:
    """Run as many cases in parallel as Ray has slots: a case takes one GPU if its device is one, else one CPU."""
    # Workers need this process's import path and data folder.
    variables = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    variables |= {DATA_ROOT: os.environ[DATA_ROOT]} if DATA_ROOT in os.environ else {}
    ray.init(ignore_reinit_error=True, log_to_driver=False, runtime_env={"env_vars": variables})
    running = {_start(case): case for case in cases}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            case = running.pop(done)
            try:
                yield ray.get(done)
            except ray.exceptions.RayError as error:
                # The process died. Exceptions of the case itself are in its record.
                yield failure(case, str(error).strip())
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _start(case: Case) -> Any:
    on_gpu = torch.device(case.device).type in ("cuda", "xpu")
    task = ray.remote(num_cpus=1, num_gpus=int(on_gpu), max_calls=1, max_retries=0)(_work)
    return task.remote(case)


def _work(case: Case) -> Record:
    prepare()
    return attempt(case)
