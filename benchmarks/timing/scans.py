"""What the reverse scan costs, in copies of its input."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.reference_scans import ANY_FACTORS, CONSTANT_FACTORS
from gradfree.benchmarks.tables.column import Column, Figure
from gradfree.benchmarks.tables.facts import estimates
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.timing.side_by_side import RATIO, times
from gradfree.benchmarks.timing.timed import Timing, timed

_OURS, _COPY = "gradfree", "copy"
_TARGET = 3.0


@dataclass(frozen=True)
class Operands:
    """Terms (steps, batch, units) in float32, and factors: one a unit, or as many as terms."""

    steps: int
    batch: int
    units: int
    constant: bool

    @property
    def size(self) -> str:
        """The shape."""
        return f"({self.steps}, {self.batch}, {self.units})"

    @property
    def kind(self) -> str:
        """What the factors are."""
        return "constant" if self.constant else "of each step"

    def __str__(self) -> str:
        return f"{self.size}, {self.kind}"

    @property
    def methods(self) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        """Whatever can be used."""
        return CONSTANT_FACTORS if self.constant else ANY_FACTORS


def _slow(facts: pl.DataFrame) -> Iterator[str]:
    """Yield where ours is slower than it ought to be."""
    ours = estimates(facts, "setting", metric="time", unit=times(_COPY), row=_OURS)
    if slow := [f"{operands} ({ratio.value:.1f})" for operands, ratio in ours.items() if ratio.value > _TARGET]:
        yield f"gradfree's takes more than {_TARGET:.0f} copies at {'; '.join(slow)}."


def _place(operands: Operands) -> dict[str, Any]:
    return {"setting": str(operands), "at": float(operands.steps * operands.batch * operands.units)}


@timed(
    kind="scan",
    subject="operands",
    metric="time",
    runs=10,
    title="reverse scan",
    legend="The baseline copies the terms (empty_like and copy_). Sizes: steps, sequences, units; float32. Factors: "
    "one a unit, or one a unit, sequence and step.",
    names={"size, factors": "setting"},
    columns=[Column("", (Figure("time", "{value:.1f}", RATIO),))],
    across="row",
    place=_place,
    topic=lambda operands: f"scan {operands.size}",
    sides=lambda operands: f"factors {operands.kind}",
    remarks=_slow,
)
def scans(case: Timing) -> Mapping[str, Callable[[], Callable[[], Tensor]]]:
    """Return what binds each method to the same operands."""
    torch.manual_seed(case.seed)
    wanted: Operands = case.item
    terms = torch.randn(wanted.steps, wanted.batch, wanted.units, device=case.device)
    factors = torch.rand(terms.shape[-1:] if wanted.constant else terms.shape, device=case.device)
    return {label: partial(partial, method, terms, factors) for label, method in wanted.methods.items()}
