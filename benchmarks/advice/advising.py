"""The command ``gradfree advise``: which engine to use for the user's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from gradfree import list_engines
from gradfree.benchmarks.advice.contest import COMPILED, LEAST_STEPS, Standings, baseline, compiled_cost, contest
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.advice.order import rows_to_try
from gradfree.benchmarks.advice.recommendation import advise, contest_section
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.environment import require
from gradfree.benchmarks.records.records import record_of
from gradfree.benchmarks.reports.publication import publish
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.sweeps.axes import Paths, chain_paths, listed
from gradfree.benchmarks.tasks.imported import Imported
from gradfree.chains.report import Report
from gradfree.cli import UsageError
from gradfree.registry import engine_class
from gradfree.wording import did_you_mean, spelled

_ENGINES, _COMPILING = 0.7, 0.9
"""Shares of the budget after which engines, and the compiled model, are not timed; the rest is for the report."""


def run(
    model: str,
    data: str | None,
    loss: str | None,
    chains: Paths,
    engines: Paths,
    device: str,
    budget: float,
    out: Path | None,
    verbose: bool,
) -> None:
    """Time the engines that can be attached; print the recommendation, the figures, and why other engines do not apply.

    Raises:
        UsageError: the model, the data, the device, an engine or a chain is missing, the loss is not finite, or every
            engine fails.
    """
    start = monotonic()
    require(device)
    names = _engine_names(engines)
    paths = chain_paths(chains)
    console = Console()
    if data is None:
        with suppress(UsageError):  # There may be none beside the model.
            data = Imported.find(f"{model.partition(':')[0]}:loader").name
    built = Imported.find(model).build()
    modules = dict(built.named_modules(remove_duplicate=False))
    named = [path for one in paths or () for path in ([one] if isinstance(one, str) else one)]
    for path in named:
        if path not in modules:
            raise UsageError(f"--chains: {model} has no module {path!r}.{did_you_mean(path, modules)}")
    job = Job(model, data, loss, paths, device) if data else None
    reports, rows = rows_to_try(built, paths, names, job.inputs if job else ())
    # For engines that cannot be attached, print only the problems: their chains would hide the answer.
    shown = {name: r if r.ok else Report(problems=r.problems) for name, r in reports.items()}
    if not rows:
        fits = any(report.ok and report.chains for report in reports.values())
        reason = "would gain anything on" if fits else "can be attached to"
        console.print(Text(f"Stay with autograd: no engine {reason} {model}.\n", "bold"))
    elif job is None:
        console.print("To measure, give data: --data module:function, which returns batches of inputs and targets.\n")
    if not rows or job is None:
        _print_reports(shown, console)
        if not rows and paths and isinstance(chains, str) and "," in chains:
            console.print(f"If these are the blocks of one chain: --chains '[[{', '.join(paths)}]]'.", markup=False)
        return
    standings, seconds = _measure(job, built.to(device).train(), rows, start, budget)
    advice = advise(standings, paths)
    sections = [contest_section(job, standings, advice.words, seconds)]
    record = record_of(f"advice/{model}", "advice", {}, [], {}, device)
    report = SuiteReport(f"gradfree advise: {model}", sections, [record], code=advice.code)
    report.print(console)
    if verbose:
        _print_reports(shown, console)
    else:
        console.print("Chains, and which engines do not apply: --verbose.")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        files = publish(report, out)
        console.print(Text(f"Report: {' '.join(map(str, files))}"))
    if standings.failures and not (standings.untried or standings.contestants[1:]):
        raise UsageError(f"every engine fails on {model}, see above: stay with autograd.")


def _engine_names(engines: Paths) -> list[str]:
    """Return the names of the engines to consider: those asked for, by default all."""
    try:
        names = [spelled(name, list_engines()) for name in listed(engines) or list_engines()]
        # What engines are compared with anyway.
        return [name for name in names if name != "autograd" and engine_class(name)]
    except (ImportError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _measure(job: Job, net: nn.Module, rows: Sequence[Row], start: float, budget: float) -> tuple[Standings, float]:
    """Return how autograd, the engines and the compiled model compare, and the seconds that this may take.

    These are ``budget``, or more if autograd's steps are too long for it.
    """
    progress = Console(stderr=True)
    with progress.status("autograd") as status:
        plain = baseline(job, net)
        missing = max(0.0, LEAST_STEPS * plain.usual - _ENGINES * budget)
        if missing:
            said = f"A step of autograd takes {plain.usual:.1f} s, so this takes about {budget + missing:.0f} s."
            progress.print(said)
        start += missing  # As if it began later.
        status.update("engines")
        standings = contest(job, net, plain, rows, start + _ENGINES * budget)
        status.update(COMPILED)
        standings.compiled = compiled_cost(job, torch.get_num_threads(), start + _COMPILING * budget - monotonic())
    return standings, budget + missing


def _print_reports(reports: Mapping[str, Report], console: Console) -> None:
    for text in dict.fromkeys(map(str, reports.values())):
        names = ", ".join(name for name, report in reports.items() if str(report) == text)
        indented = "\n".join(f"  {line}" for line in text.splitlines())
        console.print(f"{names}:\n{indented}\n", markup=False, highlight=False, soft_wrap=True)
