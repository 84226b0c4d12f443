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
"""What the extra "bench" brings for reports. A run without it leaves its records, for a report to be made later."""


def run(
    suite: str | None = None,
    out: Path | None = None,
    name: str | None = None,
    seeds: int = 3,
    device: str = "cpu",
    jobs: int = os.cpu_count() or 1,
    data: str | None = None,
    executor: Literal["local", "ray"] = "local",
    shard: str = "1/1",
    resume: bool = True,
    retry: bool = False,
    dry_run: bool = False,
    list: bool = False,
    **axes: Any,
) -> None:
    """Train with the engines of a suite, or with those that are named, time the steps, and report.

    Records are kept as they come. Started again, the command does only what is missing. A case that fails has a record
    with its error, and the run goes on. Where the packages that draw are not installed, `gradfree bench report` makes
    the report later, or elsewhere.

    Args:
        suite: the comparisons to make, "quick" if nothing is named: "quick", "rnn", "long-sequences", "gpu-time",
            "depth-map", "segments", "depth-training", "gpu-depth", "text", "forward-only",
            "forward-memory", "temperature", "forward-convolutions", "alternatives", "alternatives-short"; after papers
            "highway-bp-table6-small", "dsf-wikitext-small", "foton-depth-small".
            docs/results/index.md has what each compares, needs and takes. Or one of your own, module:function.
        out: folder for records and report; results/<suite> if not given, or one named by what is
            swept.
        name: of the run, in its report, and of its folder in results if --out names none.
        seeds: training runs for each engine and task.
        device: where to train: cpu, cuda or any other of torch's, or several, separated by commas.
        jobs: training runs at a time; as many as cores if not given.
        data: folder of the data sets that some suites need, one folder each; $GRADFREE_DATA if not given. Or, for a
            model of your own, module:function.
        executor: what runs the cases: processes on this machine, or Ray, one slot a case.
        shard: the share of the cases to run, "2/4" for the second of four; each share has a file of its own.
        resume: go on where records are there already; --no-resume refuses to.
        retry: run cases that failed again.
        dry_run: check everything and say what would be run.
        list: list all cases and whether they are done.
        **axes: what :class:`~gradfree.benchmarks.sweeps.axes.Sweep` has.
    """
    for option, value in ("seeds", seeds), ("jobs", jobs):
        if value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}.")
    session = _extra("bench.session", ())
    options = session.RunOptions(executor=executor, jobs=jobs, resume=resume, retry=retry, dry=dry_run, listing=list)
    session.run(session.KeptRun(Sweep(**axes), suite=suite, name=name), out, seeds, device, shard, data, options)


def report(suite: str | None = None, out: Path | None = None) -> None:
    """Print the tables of the records that are there; write a page, Markdown, CSV and Parquet.

    Args:
        suite: the comparisons to show, as for `gradfree bench run`. If not given, those of the run whose records the
            folder has, or "quick".
        out: folder of the records, and for the report; results/<suite> if not given.
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
    """Tell which engine to take for a model of yours: what a step costs with each, and how good its gradients are.

    Args:
        model: module:function, which builds it.
        data: module:function, which returns batches, taken as they are: inputs and a target, or mappings of the model's
            keyword arguments. The function "loader" of the model's module if not given.
        loss: module:function, called with outputs and targets. If not given, the outputs' own, else cross-entropy for
            targets of whole numbers and the squared error for others.
        chains: module paths of the chains, separated by commas, if they cannot be found without help; for blocks that
            lie beside each other a list in the list: '[[block1, block2]]'.
        engines: what to time, names or import paths, my_module:MyEngine, separated by commas; all if not given.
        device: where to measure.
        budget: how long to measure, about: 90s, 2m.
        out: folder for advice.json and a report; none if not given.
        verbose: print the chains, too, and which engines do not apply.
    """
    seconds = _seconds("budget", budget)
    if not seconds:
        raise UsageError("--budget must be above 0 s.")
    _extra("advice.advising").run(model, data, loss, chains, engines, device, seconds, out, verbose)


def _seconds(option: str, given: str) -> float:
    """Return the seconds that words like 90s and 2m mean."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", given.strip())
    if found is None:
        raise UsageError(f"--{option} takes a time like 90s or 2m, not {given!r}.")
    return float(found[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[found[2]]


COMMANDS: dict[str, Any] = {
    "_help": "Compare engines in speed, memory and accuracy on real data.",
    "run": run,
    "report": report,
}


def _extra(name: str, needed: tuple[str, ...] = DRAWING) -> ModuleType:
    """Import a module that needs the extra's packages, those of ``needed`` after hours of work."""
    require("bench", *needed)
    with needs_extra("bench"):
        return importlib.import_module(f"gradfree.benchmarks.{name}")
