"""Implementation of ``gradfree bench run``."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gradfree.benchmarks.bench.commands import DRAWING
from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.environment import require as require_device
from gradfree.benchmarks.records.names import without_sources
from gradfree.benchmarks.records.records import Record, RecordFile, error_of
from gradfree.benchmarks.running.runner import RECORDS, count_finished, finished_in, run_cases
from gradfree.benchmarks.running.workers import Executor, run_here
from gradfree.benchmarks.suites.index import suite_name
from gradfree.benchmarks.sweeps.axes import RunRequest, command_of
from gradfree.benchmarks.sweeps.sweep import comparisons_of
from gradfree.benchmarks.tables.experiment import Suite, cases
from gradfree.benchmarks.tasks.imported import names_a_function
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.cli import UsageError
from gradfree.extras import MissingExtra, needs_extra, require


def run(
    request: RunRequest,
    out: Path | None,
    seeds: int,
    device: str,
    data: str | None,
    executor: Executor,
    retry: bool,
    dry: bool,
) -> None:
    """Run the cases without a record, then report; ``dry``: only list the cases."""
    loader, sweep = data if data and names_a_function(data) else None, request.sweep
    if data and not loader:
        # Worker processes inherit it.
        os.environ[DATA_ROOT] = data
    require_device(device)
    if loader and not sweep.named:
        raise UsageError(f"--data {loader} needs a model of yours: --model module:function.")
    if sweep.named and request.suite:
        raise UsageError(f"--suite {request.suite} has its own cases: leave it out, or --{', --'.join(sweep.named)}.")
    named = None if sweep.named else suite_name(request.suite)
    kept = replace(request, loader=loader, suite=named)
    flags = {name: getattr(sweep, name) for name in sweep.named}
    flags |= {"suite": kept.suite, "seeds": seeds, "device": device, "data": data}
    folder = out or kept.folder
    kept = replace(kept, command=command_of({**flags, "out": str(folder)}))
    suite = comparisons_of(kept)
    for experiment in suite:
        experiment.check()
        if kept.suite and names_a_function(kept.suite) and isinstance(experiment, Comparison):
            experiment.task.check()
    planned, file = partial(cases, suite, seeds, device), RecordFile(folder / RECORDS)
    listed = list(planned(known := file.read()))
    finished = finished_in(known, retry)
    if skipped := count_finished(listed, finished):
        print(f"{skipped} of {len(listed)} cases are in {file.path} already and are skipped.")
    if changed := _changed(listed, known):
        print(f"{changed} of {len(listed)} cases will run again: your code that they depend on has changed.")
    if dry:
        print(f"{len(listed) - skipped} of {len(listed)} cases would run:", *_states(listed, known), sep="\n")
        return
    _refuse_local(listed)
    kept.save(folder)
    try:
        run_cases(planned, file, executor, retry)
    except KeyboardInterrupt:
        print(f"Interrupted. {file.path} has the finished cases; the same command runs the rest.", file=sys.stderr)
        raise
    known = file.read()
    _report(suite, file, kept)
    _refuse_failures(list(planned(known)), known)


def _changed(listed: Sequence[Case | None], records: Mapping[str, Record]) -> int:
    """Return how many cases have only records that were made with another version of the user's code."""
    known = {(_name(id), without_sources(record["config"])) for id, record in records.items()}
    missing = [case for case in listed if case is not None and case.id not in records]
    return sum((_name(case.id), without_sources(case.config)) in known for case in missing)


def _name(id: str) -> str:
    """Return an id without its digest."""
    return id.rpartition("/")[0]


def executor(name: str, jobs: int) -> Executor:
    """Return the executor of that name."""
    if name == "local":
        return partial(run_here, jobs=jobs)
    with needs_extra("ray"):
        from gradfree.benchmarks.running.ray_workers import run_on_ray
    return run_on_ray


def _states(listed: Sequence[Case | None], records: Mapping[str, Record]) -> Iterator[str]:
    """Yield one line for each case, and one with the number of cases that depend on trials."""
    settled = [case for case in listed if case is not None]
    for case in settled:
        state = "missing" if case.id not in records else "failed" if "error" in records[case.id] else "done"
        # Ids keep the old name of autograd, which str(case) does not show.
        yield f"{state:7}  {case}, seed {case.seed}: {case.id}"
    if waiting := len(listed) - len(settled):
        yield f"waiting  {waiting} more, for a learning rate to be chosen"


def _refuse_local(listed: Sequence[Case | None]) -> None:
    """Raise a UsageError if cases cannot be pickled, for example because they have a nested function."""
    try:
        pickle.dumps(listed)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise UsageError(
            f"cases cannot be sent to separate processes: {error}. Define what they use at the top of a module."
        ) from error


def _refuse_failures(listed: Sequence[Case | None], records: Mapping[str, Record]) -> None:
    """Raise a UsageError that lists the failed cases, if there are any."""
    errors = {c.id: error for c in listed if c and c.id in records and (error := error_of(records[c.id]))}
    if errors:
        lines = "\n".join(f"  {name}: {error}" for name, error in errors.items())
        raise UsageError(f"{len(errors)} of {len(listed)} cases failed; --retry runs them again.\n{lines}")


def _report(suite: Suite, file: RecordFile, kept: RunRequest) -> None:
    """Print and write the report, if the packages for it are installed."""
    try:
        require("bench", *DRAWING)
    except MissingExtra as missing:
        folder = file.path.parent
        print(f"{file.path} has the records, but the report cannot be written: {missing}", file=sys.stderr)
        print(f"Write it later, or on another machine: gradfree bench report --out {folder}", file=sys.stderr)
        return
    from gradfree.benchmarks.bench.reporting import write_report

    write_report(suite, file, kept)
