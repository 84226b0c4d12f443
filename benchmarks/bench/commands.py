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

BROUGHT: tuple[str, ...] = (
    "altair",
    "datasets",
    "filelock",
    "jinja2",
    "joblib",
    "lightning",
    "PIL",
    "polars",
    "rich",
    "scipy",
    "sklearn",
)
BROUGHT += ("tokenizers", "torchmetrics", "vl_convert")
"""What the extra "bench" brings for these commands, some of it imported only where it is used."""


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
    tracker: str | None = None,
    **axes: Any,
) -> None:
    """Train with the engines of a suite, or with those that are named, time the steps, and report.

    Records are kept as they come. Started again, the command does only what is missing. A case that fails has a record
    with its error, and the run goes on.

    Args:
        suite: the comparisons to make, "quick" if nothing is named: "quick", "rnn", "long-sequences", "gpu-time",
            "depth-map", "segments", "depth-training", "gpu-depth", "scan", "lightning", "text", "forward-only",
            "forward-memory", "temperature", "forward-convolutions", "watching", "ranks"; after papers
            "highway-bp-table6", "dsf-ptb", "dsf-wikitext", "foton-depth", each also with "-small" for a CPU.
            docs/benchmarks.md has what each compares, needs and takes. Or one of your own, module:function.
        out: folder for records and report; results/<suite> if not given, or one named by what is
            swept.
        name: of the run, in its report, and of its folder in results if --out names none.
        seeds: training runs for each engine and task.
        device: where to train: cpu, cuda, or both, separated by a comma.
        jobs: training runs at a time; as many as cores if not given.
        data: folder of the data sets that some suites need, one folder each; $GRADFREE_DATA if not given. Or, for a
            model of your own, module:function.
        executor: what runs the cases: processes on this machine, or Ray, one slot a case.
        shard: the share of the cases to run, "2/4" for the second of four; each share has a file of its own.
        resume: go on where records are there already; --no-resume refuses to.
        retry: run cases that failed again.
        dry_run: check everything and say what would be run.
        list: list all cases and whether they are done.
        tracker: hand every training run to Lightning's logger as well: tensorboard, wandb, csv, or one of your own,
            module:function.
        **axes: what :class:`~gradfree.benchmarks.sweeps.axes.Sweep` has.
    """
    for option, value in ("seeds", seeds), ("jobs", jobs):
        if value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}.")
    session = _extra("bench.session")
    manner = session.Manner(executor=executor, jobs=jobs, resume=resume, retry=retry, dry=dry_run, listing=list)
    session.run(
        session.KeptRun(Sweep(**axes), suite=suite, name=name), out, seeds, device, shard, data, tracker, manner
    )


def search(
    space: dict[str, Any] | None = None,
    trials: int = 40,
    out: Path = Path("results", "search"),
    seed: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    data: str | None = None,
    **axes: Any,
) -> None:
    """Search for the settings that an engine does best with on validation data, by Optuna.

    Records are kept as they come. Started again, also while it runs, also on another machine with the same folder, the
    command helps to bring the trials to the number asked for.

    Args:
        space: what to search: settings of the training (learning_rate, batch_size, length, depth, dtype, steps) and
            options of the engine, each with its range or choices: '{learning_rate: [1e-4, 1e-1, log], iterations: [0,
            8], feedback: [linspace, gate]}'. Two whole numbers are a range of such.
        trials: how many, over all processes.
        out: folder for the study and the records.
        seed: of the choice of settings.
        device: where to train.
        data: as for `gradfree bench run`.
        **axes: what :class:`~gradfree.benchmarks.sweeps.axes.Sweep` has, with one value each.
    """
    if trials < 1:
        raise UsageError(f"--trials must be at least 1, not {trials}.")
    _extra("sweeps.search", "optuna").run(Sweep(**axes), space or {}, trials, out, seed, device, data)


def report(suite: str | None = None, out: Path | None = None, tracker: str | None = None) -> None:
    """Print the tables of the records that are there; write a page, Markdown with a picture, CSV and Parquet.

    Args:
        suite: the comparisons to show, as for `gradfree bench run`. If not given, those of the run whose records the
            folder has, or "quick".
        out: folder of the records, and for the report; results/<suite> if not given.
        tracker: as for `gradfree bench run`.
    """
    _extra("bench.session").report(suite, out, tracker)


def advise(
    model: str,
    data: str | None = None,
    loss: str | None = None,
    chains: Paths = None,
    device: Literal["cpu", "cuda"] = "cpu",
    budget: str = "60s",
    train: str = "0s",
    out: Path | None = None,
) -> None:
    """Tell which engine to take for a model of yours: what a step costs with each, and how good its gradients are.

    Args:
        model: module:function, which builds it.
        data: module:function, which returns batches, taken as they are: inputs and a target, or mappings of the model's
            keyword arguments. The function "loader" of the model's module if not given.
        loss: module:function, called with outputs and targets. If not given, the outputs' own, else cross-entropy for
            targets of whole numbers and the squared error for others.
        chains: module paths of the chains, separated by commas, if they cannot be found without help.
        device: where to measure.
        budget: how long to measure, about: 90s, 2m.
        train: how long to let the fastest engines train beside backprop, in all; one seed, AdamW.
        out: folder for advice.json and a report; none if not given.
    """
    times = {option: _seconds(option, given) for option, given in (("budget", budget), ("train", train))}
    if not times["budget"]:
        raise UsageError("--budget must be above 0 s.")
    _extra("advice.advising").run(model, data, loss, chains, device, **times, out=out)


def plan_ranks(
    forward: float = 1.0,
    pull: float | None = None,
    weights: float | None = None,
    overhead: float = 0.0,
    latency: float = 0.0,
    state: float = 0.0,
    bandwidth: float = float("inf"),
    ranks: tuple[int, ...] = (2, 4, 16, 64, 256, 1024),
    microbatches: tuple[int, ...] = (1, 4, 16, 64, 256),
    out: Path | None = None,
) -> None:
    """Tell how long a step takes where the blocks of a model lie on ranks, by ``layer_parallel`` and by pipelines.

    By a model of the cost, nothing is run: as shares of one process's step, and up to how many microbatches
    ``layer_parallel`` takes less. docs/ranks.md holds it against measured steps.

    Args:
        forward: seconds of one process's forward pass through all blocks with a whole batch.
        pull: likewise for the gradient of the first block's input; as long as the forward pass if not given.
        weights: likewise for the gradients of all weights; as long as the forward pass if not given.
        overhead: seconds that each of the three takes beyond that, however small the batch.
        latency: seconds that a message between two ranks takes, however short.
        state: bytes of a state, what one block gives the next for the whole batch.
        bandwidth: bytes a second between two ranks.
        ranks: numbers of them, in brackets: [2,8].
        microbatches: numbers of parts of a batch, likewise.
        out: file for a drawing, PNG; none if not given.
    """
    costs = {"pull": forward if pull is None else pull, "weights": forward if weights is None else weights}
    costs |= {"overhead": overhead, "latency": latency}
    numbers = {"ranks": min(ranks, default=0), "microbatches": min(microbatches, default=0)}
    above = {"forward": forward, "bandwidth": bandwidth, **numbers}
    for name, value in (above | costs | {"state": state}).items():
        if not (value > 0 or (value == 0 and name not in above)):
            raise UsageError(f"--{name} must be {'more than 0' if name in above else '0 or more'}, not {value:g}.")
    costs |= {"forward": forward, "transfer": state / bandwidth}
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}.")
    from gradfree.testing.runs.step_time import StepTime

    _extra("advice.rank_plan").run(StepTime(**costs), ranks, microbatches, out)


def _seconds(option: str, given: str) -> float:
    """Return the seconds that words like 90s and 2m mean."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|)", given.strip())
    if found is None:
        raise UsageError(f"--{option} takes a time like 90s or 2m, not {given!r}.")
    return float(found[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[found[2]]


def compare(sets: list[str], out: Path | None = None) -> None:
    """Print what changed between sets of results, say of commits or machines: of each to the first.

    Args:
        sets: folders or files of records, two or more, in their order.
        out: folder for a report with a history; none if not given.
    """
    _extra("bench.session").compare([Path(name) for name in sets], out)


COMMANDS: dict[str, Any] = {
    "_help": "Compare engines in speed, memory and accuracy on real data.",
    "run": run,
    "search": search,
    "report": report,
    "compare": compare,
}


def _extra(name: str, extra: str = "bench") -> ModuleType:
    """Import a module that needs an extra's packages."""
    require("bench", *BROUGHT)
    with needs_extra(extra):
        return importlib.import_module(f"gradfree.benchmarks.{name}")
