"""Cost of a training step of a recurrent model: with torch's fused layers, as loops over cells, and by engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gradfree import create_model
from gradfree.benchmarks.data.synthetic import random_examples
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tasks.task import cross_entropy
from gradfree.benchmarks.timing.recurrent_layers import COMPILED, CellLoop, replace_layers
from gradfree.benchmarks.timing.side_by_side import STEP, Trainee, times
from gradfree.benchmarks.timing.timed import Timing, timed

FUSED, LOOP = "fused layer", "Python loop"
_SPEED = "speed"


@dataclass(frozen=True)
class RecurrentNet:
    """A model with a batch of random examples.

    Attributes:
        label: shown in reports.
        model: name of a registered model.
        options: options of the model.
        batch: number of examples.
        example: shape of an example: (T,) tokens, or an image (C, H, W).
        classes: number of classes of the targets; there is one target a token, or one an image.
    """

    label: str
    model: str
    options: Mapping[str, Any]
    batch: int
    example: tuple[int, ...]
    classes: int

    def __str__(self) -> str:
        return self.label


def _speedup(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the row's speedup over the Python loop."""
    for loop in results["rows"]:
        if loop["label"] == LOOP and "time" in cost:
            yield fact(_SPEED, times(LOOP), loop["time"] / cost["time"])


@timed(
    kind="recurrent step",
    subject="net",
    runs=1,
    title="training steps of recurrent models",
    legend=f"A training step with Adam; × faster: than the {LOOP} over torch's cell. {FUSED}: torch's module, with a "
    f"kernel of cuDNN or oneDNN if there is one; {COMPILED}: the loop over a cell compiled by torch.compile.",
    names={"row": "row"},
    columns=[
        column("(ms)", STEP, "{value:.1f}", "s", factor=1e3),
        column("(× faster)", _SPEED, unit=times(LOOP)),
    ],
    across="setting",
    facts=_speedup,
)
def recurrent_steps(case: Timing) -> Mapping[str, Callable[[], Trainee]]:
    """Return, by label, functions that build the model in training: fused layers, loops over cells, each engine."""
    loops = {LOOP: partial(_trainee, case, loop=CellLoop)}
    loops[COMPILED] = partial(_trainee, case, loop=partial(CellLoop, compiled=True))
    engines = {row.label: partial(_trainee, case, row) for row in case.rows}
    return {FUSED: partial(_trainee, case), **loops, **engines}


def _trainee(case: Timing, row: Row | None = None, loop: Callable[[nn.RNNBase], nn.Module] | None = None) -> Trainee:
    net: RecurrentNet = case.item
    torch.manual_seed(case.seed)
    model = create_model(net.model, **net.options).to(case.device)
    if loop is not None:
        replace_layers(model, loop)
    if row is not None:
        row.create_engine().attach(model)
    examples = random_examples((net.batch, *net.example), net.classes, tokens=len(net.example) == 1)
    inputs, targets = (tensor.to(case.device) for tensor in examples)
    return Trainee(model, torch.optim.Adam(model.parameters()), cross_entropy, inputs, targets)
