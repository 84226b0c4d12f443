"""What every engine would do with a model of the user's own, and what that costs on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from gradfree import gradient_fidelity, list_engines
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.environment import require
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.sweeps.axes import Paths, listed
from gradfree.benchmarks.sweeps.sweep import row
from gradfree.benchmarks.tasks.imported import Imported
from gradfree.benchmarks.tasks.loaded import own_task
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.speed import clocked, in_turns, noted, statistics
from gradfree.benchmarks.timing.trainee import Trainee
from gradfree.cli import UsageError
from gradfree.fidelity import Agreement

_DIGITS = 4
"""Of a cosine."""
AS_GOOD = 0.99
"""The cosine from which on a gradient is recommended without a second thought."""


@dataclass(frozen=True)
class Measured:
    """An engine on one batch.

    Attributes:
        row: the engine.
        gradient: compared with exact backpropagation's.
        cost: times of a training step, and ratios to plain backprop's, as :func:`statistics` has them.
    """

    row: Row
    gradient: Agreement
    cost: dict[str, Any]


def check(model: str, data: str | None, loss: str | None, chains: Paths, device: str) -> None:
    """Print every engine's report, measure those that can be attached, and recommend one.

    Raises:
        UsageError: the model, the data or the device are not there.
    """
    require(device)
    paths = listed(chains) or None
    console = Console()
    data = data or _loader_beside(model)
    task = own_task(model, {}, data, loss, paths) if data else None
    built = task.create_model(0) if task else Imported.to(model)()
    rows = [row(name, {}) for name in list_engines()]
    reports = {r.engine: r.create_engine().validate(built, paths) for r in rows}
    for text in dict.fromkeys(map(str, reports.values())):
        names = ", ".join(name for name, report in reports.items() if str(report) == text)
        console.print(f"{names}:\n{_indented(text)}\n", markup=False, highlight=False, soft_wrap=True)
    if task is None:
        console.print(
            "Nothing is measured without data: --data module:function, which returns batches of inputs and targets."
        )
        return
    attached = [r for r in rows if reports[r.engine].ok and reports[r.engine].chains]
    measured, failures = measure_rows(task, built.to(device), attached, device)
    for label, problem in failures.items():
        console.print(f"{label} failed: {problem}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(measured, task.batch_size))
    advice = recommendation(measured, f"--model {model} --data {data}")
    console.print(advice, markup=False, highlight=False, soft_wrap=True)


def _loader_beside(model: str) -> str | None:
    """Return the function ``loader`` of the model's module, if there is one."""
    name = f"{model.partition(':')[0]}:loader"
    try:
        return Imported.to(name).name
    except UsageError:
        return None


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def measure_rows(
    task: Task, model: nn.Module, rows: Sequence[Row], device: str
) -> tuple[list[Measured], dict[str, str]]:
    """Return what plain backprop and each of ``rows`` comes to on one batch, and why others failed.

    Raises:
        UsageError: the model cannot be trained at all.
    """
    batch = task.on(device, next(task.batches(task.data().train, 0)))
    started: dict[str, tuple[Row, Agreement, Trainee]] = {}
    failures: dict[str, str] = {}
    for candidate in (BACKPROP, *rows):
        # What goes wrong in one engine's pass says nothing about the next.
        with noted(failures, candidate.label, _named):
            fidelity = gradient_fidelity(candidate.create_engine(), model, task.loss, batch, task.chains)
            trainee = Trainee.of(task, candidate, device, 0)
            trainee()
            started[candidate.label] = candidate, fidelity.total, trainee
    if BACKPROP.label in failures:
        raise UsageError(f"{task.model} cannot be trained on these data: {failures[BACKPROP.label]}")
    try:
        times = in_turns([partial(clocked, trainee) for *_, trainee in started.values()])
    except Exception as error:
        raise UsageError(f"{task.model} fails after some steps: {_named(error)}") from error
    costs = [statistics(own, times[0]) for own in times]
    return [Measured(r, g, cost) for (r, g, _), cost in zip(started.values(), costs, strict=True)], failures


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _table(measured: Sequence[Measured], batch_size: int) -> Table:
    threads = torch.get_num_threads()
    title = f"one batch of {batch_size} examples, {threads} threads"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for heading in ("engine", "cosine", "norm ratio", "step (ms)", "step time (×)", "quartiles"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for m in measured:
        low, high = m.cost["ratio_quartiles"]
        figures = [f"{m.gradient.cosine:.{_DIGITS}f}", f"{m.gradient.norm_ratio:.3f}", f"{1e3 * m.cost['time']:.2f}"]
        table.add_row(m.row.label, *figures, f"{m.cost['ratio']:.2f}", f"{low:.2f} to {high:.2f}")
    return table


def recommendation(measured: Sequence[Measured], names: str) -> str:
    """Return what to do in view of the figures; ``names`` are the options that name model and data."""
    _, *others = measured
    if not others:
        return "Nothing to compare with plain backprop: no engine could be put on this model, see above."
    # Between the quartiles of the ratio it is anyone's guess.
    faster = [m for m in others if m.cost["ratio_quartiles"][1] < 1]
    as_good = [m for m in faster if m.gradient.cosine >= AS_GOOD]
    if as_good:
        fastest = min(as_good, key=lambda m: m.cost["ratio"])
        # Those whose quartiles reach the fastest's may be as fast: of them the nearest gradient, to the digits shown.
        rivals = [m for m in as_good if m.cost["ratio_quartiles"][0] <= fastest.cost["ratio_quartiles"][1]]
        best = max(rivals, key=lambda m: (round(m.gradient.cosine, _DIGITS), -m.cost["ratio"]))
        verdict = "its gradient is backprop's, or next to it"
    elif faster:
        best = max(faster, key=lambda m: m.gradient.cosine)
        verdict = "its gradient is only akin to backprop's"
    else:
        return "Stay with plain backprop: no engine takes less time for a step of this model on this device."
    return (
        f"Try {best.row.label}: a step takes {best.cost['ratio']:.2f} of plain backprop's time, and {verdict} (cosine "
        f"{best.gradient.cosine:.{_DIGITS}f}). "
        f"How well it trains: gradfree bench run {names} --engines {best.row.engine}"
    )
