"""How long a step takes on ranks, one model over all of them, by a model of the cost: ``gradfree plan-ranks``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradfree.benchmarks.reports.drawing import picture
from gradfree.benchmarks.tables.chart import NO_ENDS, TIPS, Axis, Chart
from gradfree.testing.runs.step_time import StepTime

Way = Callable[[StepTime, int, int], float]

OURS: dict[str, Way] = {
    "layer_parallel, k=0": partial(StepTime.layer_parallel, sweeps=0),
    "layer_parallel, k=1": partial(StepTime.layer_parallel, sweeps=1),
    "layer_parallel, k=2": partial(StepTime.layer_parallel, sweeps=2),
    "layer_parallel, backprop": StepTime.rank_by_rank,
}
PIPELINES: dict[str, Way] = {
    "GPipe": StepTime.gpipe,
    "1F1B": StepTime.one_f_one_b,
    "zero-bubble, at best": StepTime.zero_bubble,
}
_MOST = 4096
"""Microbatches up to which a way is followed."""


def run(model: StepTime, ranks: Sequence[int], microbatches: Sequence[int], out: Path | None) -> None:
    """Print the shares of one process's step that all ways take, and up to where ours take less; draw them."""
    console = Console()
    table = Table("share of one process", "m", *(f"n={n}" for n in ranks), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, way in (OURS | PIPELINES).items():
        for m in microbatches:
            table.add_row(name, str(m), *(f"{_share(model, way, n, m):.3f}" for n in ranks))
        table.add_section()
    console.print(table)
    for pipeline in ("1F1B", "zero-bubble, at best"):
        title = f"less than {pipeline}: m up to"
        table = Table(title, *(f"n={n}" for n in ranks), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, way in OURS.items():
            most = [_most(model, way, PIPELINES[pipeline], n) for n in ranks]
            table.add_row(name, *("any" if m == _MOST else str(m or "-") for m in most))
        console.print(table)
    if out is not None:
        out.write_bytes(picture([chart(model, n, max(microbatches)) for n in ranks]))
        console.print(f"Drawn: {out}")


def chart(model: StepTime, ranks: int, most: int) -> Chart:
    """Return the shares of all ways by the number of microbatches, up to ``most``."""
    numbers = takewhile(lambda m: m <= most, (2**power for power in count()))
    shares = [(name, m, _share(model, way, ranks, m)) for m in numbers for name, way in (OURS | PIPELINES).items()]
    found = pl.DataFrame(shares, schema={"label": pl.String, "x": pl.Int64, "y": pl.Float64}, orient="row")
    texts = {name: pl.lit(None, pl.String) for name in (TIPS, "row", "setting")}
    return Chart(
        f"{ranks} ranks",
        found.with_columns(**NO_ENDS, **texts),
        Axis("microbatches m (count)", "counts"),
        Axis("time of a step, as a share of one process's (×)", "log"),
        "solid",
    )


def _share(model: StepTime, way: Way, ranks: int, microbatches: int) -> float:
    return way(model, ranks, microbatches) / model.one_process


def _most(model: StepTime, way: Way, other: Way, ranks: int) -> int:
    """Return up to how many microbatches, from one on, ``way`` takes less than ``other`` with as many."""
    numbers = range(1, _MOST + 1)
    return len(list(takewhile(lambda m: way(model, ranks, m) < other(model, ranks, m) * (1 - 1e-9), numbers)))
