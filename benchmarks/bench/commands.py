"""``gradfree bench`` on the command line; light to import, as every ``gradfree`` command imports it."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gradfree.benchmarks.sweeps.axes import Paths, Sweep
from gradfree.cli import UsageError
from gradfree.extras import needs_extra, require

DRAWING = ("altair", "jinja2", "polars", "rich", "scipy", "vl_convert")
"""Packages of the extra "bench" that only reports need. A run without them keeps its records for a later report."""


def run(
    suite: str | None = None,
    out: Path | None = None,
    seeds: int = 3,
    device: str = "cpu",
    jobs: int = os.cpu_count() or 1,
    data: str | None = None,
    executor: Literal["local", "ray"] = "local",
    retry: bool = False,
    dry_run: bool = False,
    **axes: Any,
) -> None:
    """Train with the engines of a suite, or with named ones, time the steps, and report.

    Each record is stored at once. Started again, the command runs only the missing cases. A failed case gets a record
    with its error, and the run continues. If the packages for reports are not installed, `gradfree bench report` can
    write the report later, or on another machine.

    Args:
        suite: the comparisons to run, by default "quick"; docs/results/index.md lists all, with contents, data and
            duration. Or your own suite, module:function.
        out: folder for records and report; by default results/<suite>, or a folder named after the sweep.
        seeds: number of training runs for each engine and task.
        device: device to train on: cpu, cuda or another device of torch.
        jobs: number of training runs in parallel; by default the number of cores.
        data: folder with one folder for each data set that the suite needs; by default $GRADFREE_DATA. Or, for your
            own model, module:function.
        executor: where cases run: in processes on this machine, or on Ray, one slot a case.
        retry: run failed cases again.
        dry_run: check everything, and list all cases and their states.
        **axes: the options of :class:`~gradfree.benchmarks.sweeps.axes.Sweep`.
    """
    for option, value in ("seeds", seeds), ("jobs", jobs):
        if value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}.")
    session = _extra("bench.session", ())
    request, runs = session.RunRequest(Sweep(**axes), suite=suite), session.executor(executor, jobs)
    session.run(request, out, seeds, device, data, runs, retry, dry_run)


def report(suite: str | None = None, out: Path | None = None) -> None:
    """Print the tables of existing records; write the report as a page, Markdown, CSV and Parquet.

    Args:
        suite: the comparisons to show, as in `gradfree bench run`; by default those of the run that made the folder,
            or "quick".
        out: folder of the records and of the report; by default results/<suite>.
    """
    _extra("bench.reporting").report(suite, out)


def advise(
    model: str,
    data: str | None = None,
    loss: str | None = None,
    chains: Paths = None,
    engines: Paths = None,
    device: str = "cpu",
    budget: str = "60s",
    out: Path | None = None,
    verbose: bool = False,
) -> None:
    """Recommend an engine for your model: compare the cost of a step and the accuracy of the gradients.

    Args:
        model: module:function, which returns the model.
        data: module:function, which returns batches that are used unchanged: inputs and a target, or mappings of the
            model's keyword arguments. By default, the function "loader" of the model's module.
        loss: module:function, called with outputs and targets. By default, the outputs' attribute "loss", else
            cross-entropy for integer targets and the squared error for others.
        chains: module paths of the chains, separated by commas, if they are not found automatically; for blocks that
            are attributes of one module a list in the list: '[[block1, block2]]'.
        engines: engines to time: names or import paths, my_module:MyEngine, separated by commas; by default all.
        device: device to measure on.
        budget: approximate duration of the measurements: 90s, 2m.
        out: folder for a report; by default none is written.
        verbose: also print the chains, and the engines that do not apply.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", budget.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--budget takes a time like 90s or 2m, not {budget!r}.")
    seconds = float(found[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[found[2]]
    _extra("advice.advising").run(model, data, loss, chains, engines, device, seconds, out, verbose)


COMMANDS: dict[str, Any] = {
    "_help": "Compare engines in speed, memory and accuracy on real data.",
    "run": run,
    "report": report,
}


def _extra(name: str, needed: tuple[str, ...] = DRAWING) -> ModuleType:
    """Import a module that needs the extra "bench".

    The packages ``needed`` are checked first, as a long run would import them only at its end.
    """
    require("bench", *needed)
    with needs_extra("bench"):
        return importlib.import_module(f"gradfree.benchmarks.{name}")
