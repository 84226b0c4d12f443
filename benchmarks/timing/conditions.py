"""Steps of recurrent layers under many conditions, beside torch's own layer: an engine must not make any slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.recurrent_layers import PLAIN
from gradfree.benchmarks.timing.side_by_side import PASSES
from gradfree.benchmarks.timing.timed import Timing, timed

_MODULES: dict[str, Callable[..., nn.RNNBase]] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
_SLOWER = 1.05
"""An engine's pass that takes more than this multiple of torch's is named in the report."""


@dataclass(frozen=True)
class Condition:
    """A recurrent layer of torch with 128 units, 32 sequences of 200 steps, and what is not usual about it.

    Attributes:
        cell: GRU, LSTM or RNN.
        dtype: dtype of weights and inputs.
        autocast: dtype of autocast, "" without it.
        directions: 1 or 2.
        layers: number of layers.
        projection: size of an LSTM's projected state, 0 without one.
        frozen: which parameters are not trained: "" none, "recurrent" or "all".
        norm: whether ``torch.nn.utils.spectral_norm`` is on the recurrent weights.
        batch_first: whether inputs are (B, T, I).
        batch: B.
    """

    cell: str
    dtype: str = "float32"
    autocast: str = ""
    directions: int = 1
    layers: int = 1
    projection: int = 0
    frozen: str = ""
    norm: bool = False
    batch_first: bool = True
    batch: int = 32

    def __str__(self) -> str:
        changed = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return ", ".join([self.cell, *(f"{f.name} {getattr(self, f.name)}".replace("_", " ") for f in changed)])


def _conditions() -> Iterator[Condition]:
    """Yield each condition by itself, for each cell."""
    for cell in _MODULES:
        yield Condition(cell)
        yield from (Condition(cell, dtype=dtype) for dtype in ("float64", "bfloat16", "float16"))
        # On a CPU torch has no LSTM in float16 under autocast.
        dtypes = ("bfloat16",) if cell == "LSTM" else ("bfloat16", "float16")
        yield from (Condition(cell, autocast=dtype) for dtype in dtypes)
        yield Condition(cell, directions=2)
        yield Condition(cell, layers=2)
        yield from (Condition(cell, frozen=which) for which in ("recurrent", "all"))
        yield Condition(cell, norm=True)
        yield Condition(cell, batch_first=False)
        yield Condition(cell, batch=1)
    yield Condition("LSTM", projection=64)


CONDITIONS = tuple(_conditions())


class ConditionPass:
    """A forward and backward pass under a condition, with an engine or without one."""

    def __init__(self, case: Timing, row: Row | None = None):
        torch.manual_seed(case.seed)
        self.condition: Condition = case.item
        self.device = torch.device(case.device)
        self.module = self._layer()
        sizes = (self.condition.batch, 200) if self.condition.batch_first else (200, self.condition.batch)
        # The gradient of the input is needed where no weight is trained.
        self.x = torch.randn(*sizes, 128).to(self.device, getattr(torch, self.condition.dtype)).requires_grad_()
        if row is not None:
            row.create_engine().attach(self.module, [""])

    def _layer(self) -> nn.RNNBase:
        c = self.condition
        options: dict[str, Any] = {"num_layers": c.layers, "bidirectional": c.directions == 2}
        options |= {"batch_first": c.batch_first} | ({"proj_size": c.projection} if c.projection else {})
        layer = _MODULES[c.cell](128, 128, **options).to(self.device, getattr(torch, c.dtype))
        if c.norm:
            torch.nn.utils.spectral_norm(layer, "weight_hh_l0")
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not (c.frozen == "all" or (c.frozen == "recurrent" and "_hh_" in name)))
        return layer

    def _context(self) -> AbstractContextManager[object]:
        dtype = self.condition.autocast
        return torch.autocast(self.device.type, getattr(torch, dtype)) if dtype else nullcontext()

    def __call__(self) -> None:
        """Run both passes."""
        with self._context():
            out: Tensor = self.module(self.x)[0]
        out.float().square().mean().backward()
        self.x.grad = None
        self.module.zero_grad()


@timed(
    kind="condition",
    subject="condition",
    metric=PASSES,
    title="recurrent layers under many conditions",
    legend="Forward and backward pass of a layer of 128 units, 32 sequences of 200 steps unless the condition says "
    "otherwise, as a multiple of torch's own layer.",
    names={"condition": "setting"},
    across="row",
    limit=_SLOWER,
)
def conditions(case: Timing) -> Mapping[str, Callable[[], ConditionPass]]:
    """Return, by label, functions that build the passes: plain, and with each engine."""
    return {PLAIN: partial(ConditionPass, case), **{row.label: partial(ConditionPass, case, row) for row in case.rows}}
