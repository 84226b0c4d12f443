"""Cost of a recurrent layer of torch on packed sequences of several lengths, with each engine."""

from __future__ import annotations

import pydoc_data.topics
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.side_by_side import PASSES
from gradfree.benchmarks.timing.timed import Timing, timed

PACKED, PADDED = "packed", "padded"
_MODULES: dict[str, Callable[..., nn.RNNBase]] = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
_INPUTS = 32


def _uniform(batch: int, steps: int) -> Tensor:
    return torch.randint(max(1, steps // 4), steps + 1, (batch,))


def _log_normal(batch: int, steps: int) -> Tensor:
    """As the durations of speech: σ = 0.6, most at a third of the longest."""
    return (torch.randn(batch).mul(0.6).exp() * steps / 3).round().clamp(1, steps).long()


def _sentences(batch: int, steps: int) -> Tensor:
    """The numbers of words of sentences in the documentation of Python."""
    text = " ".join(pydoc_data.topics.topics.values())
    lengths = torch.tensor([len(sentence.split()) for sentence in re.split(r"[.!?]\s", text)])
    lengths = lengths[(lengths > 0) & (lengths <= steps)]
    return lengths[torch.randint(len(lengths), (batch,))]


_LENGTHS: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": _uniform,
    "log-normal": _log_normal,
    "sentences": _sentences,
}


@dataclass(frozen=True)
class PackedLayer:
    """A recurrent layer of torch with 32 inputs, on packed sequences.

    Attributes:
        cell: "GRU", "LSTM" or "RNN".
        batch: the number of sequences.
        steps: the length of the longest one.
        units: H.
        lengths: of the others: "uniform" from a quarter of the longest on, "log-normal", or those of "sentences".
        both: whether the layer has both directions.
    """

    cell: str
    batch: int
    steps: int
    units: int
    lengths: str = "uniform"
    both: bool = False

    def __str__(self) -> str:
        both = ", both directions" if self.both else ""
        return f"{self.cell} ({self.batch}, {self.steps}, {self.units}){both}, {self.lengths}"


class PackedPass:
    """A forward and backward pass of a layer on packed sequences, or on the same ones padded."""

    def __init__(self, case: Timing, row: Row | None = None, padded: bool = False, trains: bool = True):
        torch.manual_seed(case.seed)
        layer: PackedLayer = case.item
        lengths = _LENGTHS[layer.lengths](layer.batch, layer.steps)
        lengths[0] = layer.steps
        self.module = _MODULES[layer.cell](_INPUTS, layer.units, bidirectional=layer.both).to(case.device)
        x = torch.randn(layer.steps, layer.batch, _INPUTS, device=case.device)
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        self.input: Any = x if padded else packed
        rows = x.shape[:2] if padded else packed.data.shape[:1]
        self.cotangent = torch.randn(*rows, layer.units * (2 if layer.both else 1), device=case.device)
        self.trains = trains
        if row is not None:
            row.create_engine().attach(self.module, [""])

    def __call__(self) -> None:
        """Run both passes, or the forward pass alone."""
        with torch.set_grad_enabled(self.trains):
            out = self.module(self.input)[0]
        if self.trains:
            (out if isinstance(out, Tensor) else out.data).backward(self.cotangent)
            self.module.zero_grad()


class SelfTimedPass(PackedPass):
    """A pass that returns its seconds, so that it is not run twice more before each of its turns."""

    def __call__(self) -> float:  # type: ignore[override]
        """Run both passes."""
        start = perf_counter()
        super().__call__()
        return perf_counter() - start


_OPTIONS: dict[str, Any] = {
    "subject": "layer",
    "rounds": 3,
    "runs": 1,
    "names": {"layer": "setting"},
    "across": "row",
}
_SIZES = "Sizes: sequences, steps of the longest, units."


@timed(
    kind="packed layer",
    metric=PASSES,
    title="packed sequences, training",
    legend=f"Both passes as a multiple of torch's on packed sequences. {_SIZES}",
    **_OPTIONS,
)
def packed_layers(case: Timing) -> Mapping[str, Callable[[], PackedPass]]:
    """Return, by label, functions that build the passes: packed and padded without an engine, packed with each."""
    make = partial(SelfTimedPass if case.more.get("self_timed") else PackedPass, case)
    return {PACKED: make, PADDED: partial(make, padded=True)} | {row.label: partial(make, row) for row in case.rows}


@timed(
    kind="evaluated packed layer",
    metric="time of the forward pass",
    title="packed sequences, evaluation",
    legend=f"Forward pass without gradients as a multiple of torch's on packed sequences. {_SIZES}",
    **_OPTIONS,
)
def evaluated_packed_layers(case: Timing) -> Mapping[str, Callable[[], PackedPass]]:
    """Return, by label, functions that build the forward passes, as :func:`packed_layers`."""
    make = partial(PackedPass, case, trains=False)
    return {PACKED: make, PADDED: partial(make, padded=True)} | {row.label: partial(make, row) for row in case.rows}
