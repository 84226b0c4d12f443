"""From a sweep's options to a suite: one comparison for every combination."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import product
from math import inf, isfinite
from typing import Any, TypeVar

from torch import nn

from gradfree import list_engines
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites import alternatives, forward_only
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.suites.long_sequences import LONG_TASKS
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.sweeps.axes import Names, RunRequest, Sweep, chain_paths, listed
from gradfree.benchmarks.tables.experiment import Experiment, Suite
from gradfree.benchmarks.tasks import catalogue
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.tasks.imported import Imported, names_a_function
from gradfree.benchmarks.tasks.loaded import own_task
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.target import TimeToTarget
from gradfree.cli import UsageError
from gradfree.entries import MODELS, lookup
from gradfree.wording import no_such, spelled

TASKS: dict[str, Task] = {
    **{
        task.name.replace("_", "-"): task
        for task in (*catalogue.TASKS, *forward_only.TASKS, *LONG_TASKS, *alternatives.TASKS)
    },
    "mnist-orthogonal": forward_only.MNIST,
    "cifar10-orthogonal": forward_only.CIFAR10,
}
"""The tasks that a sweep can name, also with underscores. Their own names are parts of ids and never change."""

_DTYPES = ("float32", "float64", "bfloat16")
_DEPTHS = ("depth", "layers")
_EVALUATIONS = 20

_Number = TypeVar("_Number", int, float)


def comparisons_of(request: RunRequest) -> Suite:
    """Return the suite that a run requests.

    Raises:
        UsageError: there is no such suite, or the user's function returns something else.
    """
    name = request.suite
    if request.sweep.named or not name:
        return suite_of(request.sweep, request.loader)
    if not names_a_function(name):
        if name not in SUITES:
            raise UsageError(no_such("suite", name, SUITES))
        return SUITES[name]
    own = Imported.find(name).result()
    if not (isinstance(own, tuple) and own and all(isinstance(one, Experiment) for one in own)):
        raise UsageError(f"{name} returns no suite: return a tuple of experiments, such as (Comparison(task, rows),).")
    return own


def suite_of(sweep: Sweep, loader: str | None = None) -> Suite:
    """Return the comparisons of a sweep.

    Args:
        sweep: the sweep's options.
        loader: ``module:function`` that returns the data, for the user's own model.

    Raises:
        UsageError: unknown names, contradictory options, or an impossible combination.
    """
    if sweep.steps is not None and sweep.steps <= 0:
        raise UsageError(f"--steps must be above 0, not {sweep.steps}.")
    if sweep.target is not None and not isfinite(sweep.target):
        raise UsageError(f"--target must be a number, a validation score, not {sweep.target}.")
    rates = tuple(sorted(_numbers("learning_rates", sweep.learning_rates, float)))
    # A single rate needs no trials.
    grid = rates if len(rates) > 1 else ()
    tasks = list(_tasks(sweep, loader))
    tasks = [replace(task, learning_rate=rates[0]) for task in tasks] if len(rates) == 1 else tasks
    comparisons = _comparisons(sweep, tasks, grid)
    if sweep.target is None:
        return tuple(comparisons)
    return tuple(experiment for c in comparisons for experiment in (c, TimeToTarget(c, sweep.target)))


def _comparisons(sweep: Sweep, tasks: Sequence[Task], grid: tuple[float, ...]) -> list[Comparison]:
    """Return a comparison for each task that an engine fits; print which engines and tasks are left out, and why."""
    found, left_out = [], []
    for task in tasks:
        rows, reasons = _rows(sweep, task)
        if rows:
            found.append(Comparison(task, (BACKPROP, *rows), grid))
        else:
            left_out.append(f"{task.name} is left out: no engine to compare with autograd.")
        left_out += reasons
    if not found:
        raise UsageError("\n".join(left_out))
    if left_out:
        print(*left_out, sep="\n", file=sys.stderr)
    return found


def _tasks(sweep: Sweep, loader: str | None) -> Iterator[Task]:
    """Yield a task for each combination of everything but engines and seeds."""
    dtypes = list(with_options(sweep.dtype))
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise UsageError(no_such("dtype", dtype, _DTYPES))
    axes = {
        "batch": _numbers("batch_size", sweep.batch_size, int),
        "length": _numbers("length", sweep.length, int),
        "depth": _numbers("depth", sweep.depth, int),
        "dtype": dtypes,
    }
    evaluations = 0 if sweep.target is None else _EVALUATIONS
    for task in _with_all_models(sweep, loader):
        for chosen in _combinations({axis: values for axis, values in axes.items() if values}):
            varied = replace(task, steps=sweep.steps or task.steps, evaluations=evaluations)
            for axis, value in chosen.items():
                varied = _VARIATIONS[axis](varied, value)
            varied = replace(varied, name=_label(task.name, chosen))
            varied.check()
            yield varied


def _with_all_models(sweep: Sweep, loader: str | None) -> Iterator[Task]:
    """Yield each named task, or the user's models, each with each combination of its options, on the user's data."""
    models = with_options(sweep.model)
    own = {"model": models, "data": loader, "loss": sweep.loss, "score": sweep.score, "chains": sweep.chains}
    named = " and ".join(f"--{option}" for option, value in own.items() if value)
    missing = " and ".join(f"--{option} module:function" for option in ("model", "data") if not own[option])
    if not named:
        yield from _named_tasks(sweep.tasks)
    elif sweep.tasks:
        raise UsageError(f"tasks have their own model and data: leave out --tasks or {named}.")
    elif missing:
        raise UsageError(f"a run with {named} also needs {missing}.")
    for name, given in models.items():
        for options in _combinations(given):
            task = own_task(name, options, str(loader), sweep.loss, chain_paths(sweep.chains), sweep.score)
            yield replace(task, name=_label(name, options))


def _named_tasks(tasks: Names) -> Iterator[Task]:
    names = with_options(tasks)
    if not names:
        raise UsageError(f"no task is given: use --tasks {DIGITS.name}, for example. Tasks: {', '.join(TASKS)}.")
    for name, options in names.items():
        task = TASKS.get(spelled(name, TASKS))
        if task is None:
            raise UsageError(f"{no_such('task', name, TASKS)} Data of yours: --model, --data module:function.")
        if options:
            raise UsageError(f"the task {name!r} has no options.")
        yield task


def _label(name: str, options: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{option}={value}" for option, value in options.items())]).strip()


def _rows(sweep: Sweep, task: Task) -> tuple[list[Row], list[str]]:
    """Return each engine that the model allows with each combination of its options, and why others are left out."""
    known, every = list_engines(), sweep.engines is None or sweep.engines == "all"
    wanted = {name: {} for name in known} if every else with_options(sweep.engines)
    # Every comparison has this baseline anyway.
    wanted.pop("autograd", None)
    wanted = {spelled(name, known): given for name, given in wanted.items()}
    rows = [row(name, options) for name, given in wanted.items() for options in _combinations(given)]
    model = task.create_model(0)
    problems = {candidate.label: _problem(candidate, model, task) for candidate in rows}
    refused: dict[str, list[str]] = {}
    for label, problem in problems.items():
        if problem:
            refused.setdefault(problem, []).append(label)
    reasons = [f"{task.name} without {', '.join(labels)}: {problem}" for problem, labels in refused.items()]
    return [r for r in rows if not problems[r.label] and r.options != BACKPROP.options], reasons


def _problem(candidate: Row, model: nn.Module, task: Task) -> str:
    """Return why the engine cannot be attached; empty if it can."""
    try:
        report = candidate.create_engine().validate(model, task.chains)
    except (ImportError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return next(iter(report.problems), "")


def row(engine: str, options: Mapping[str, Any]) -> Row:
    """Return a row that is labelled by its engine and options."""
    if engine == BACKPROP.engine and not options:
        return Row(f"{engine} (default)", engine, options)
    return Row(
        _label(engine, {"k" if name == "iterations" else name: v for name, v in options.items()}), engine, options
    )


def with_options(names: Names) -> dict[str, Mapping[str, Any]]:
    """Return the options of each name.

    Raises:
        UsageError: the options have no names, or only some names have options.
    """
    if not isinstance(names, dict):
        if strange := [name for name in listed(names) if not isinstance(name, str) or set(name) & set("[]{} ")]:
            raise UsageError(
                f"{strange[0]} is not a name; write names with options as '{{fa: , highway_bp: {{iterations: 0}}}}'."
            )
        return {name: {} for name in listed(names)}
    for name, options in names.items():
        if not isinstance(options, Mapping | None):
            raise UsageError(
                f"the options of {name} need names, as in '{{highway_bp: {{iterations: [0, 1]}}}}', not {options!r}."
            )
    return {name: options or {} for name, options in names.items()}


def _combinations(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value each where options have a list of them."""
    values = [value if isinstance(value, list) else [value] for value in options.values()]
    for chosen in product(*values):
        yield dict(zip(options, chosen, strict=True))


def _numbers(name: str, given: Any, kind: Callable[[Any], _Number]) -> list[_Number]:
    """Return the numbers of an option."""
    values = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    try:
        numbers = [] if given is None else [kind(value) for value in values]
    except ValueError:
        numbers = [kind(0)]
    if not all(0 < number < inf for number in numbers):
        raise UsageError(f"--{name.replace('_', '-')} takes numbers above 0, separated by commas, not {given!r}.")
    return numbers


def _with_length(task: Task, length: int) -> Task:
    if not (is_dataclass(task.data) and any(f.name == "length" for f in fields(task.data))):
        able = [name for name, t in TASKS.items() if hasattr(t.data, "length")]
        raise UsageError(f"the task {task.name!r} has no --length; tasks that have one: {', '.join(able)}.")
    options = {**task.options, "context": length} if "context" in task.options else task.options
    return replace(task, data=replace(task.data, length=length), options=options)


def _with_depth(task: Task, depth: int) -> Task:
    known = inspect.signature(task.builder.load() if task.builder else lookup(MODELS, task.model)).parameters
    option = next((name for name in _DEPTHS if name in known), None)
    if option is None:
        raise UsageError(f"the model {task.model!r} has no --depth; its options are: {', '.join(known)}.")
    return replace(task, options={**task.options, option: depth})


_VARIATIONS: dict[str, Callable[[Task, Any], Task]] = {
    "batch": lambda task, size: replace(task, batch_size=size),
    "length": _with_length,
    "depth": _with_depth,
    "dtype": lambda task, dtype: replace(task, dtype=dtype),
}
