"""Cost of a recurrent layer of torch on packed sequences of several lengths, with each engine."""

from __future__ import annotations

import pydoc_data.topics
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.side_by_side import PASSES, now
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
    """A forward and backward pass of a layer on packed sequences, or on the same ones padded.

    The lengths are new in each pass, as they are in training: oneDNN prepares a kernel for each new shape. The passes
    of the same number have the same sequences in all rows.
    """

    def __init__(self, case: Timing, row: Row | None = None, padded: bool = False, trains: bool = True):
        layer: PackedLayer = case.item
        self.case, self.layer, self.padded, self.trains, self.passes = case, layer, padded, trains, 0
        torch.manual_seed(case.seed)
        self.module = _MODULES[layer.cell](_INPUTS, layer.units, bidirectional=layer.both).to(case.device)
        if row is not None:
            row.create_engine().attach(self.module, [""])

    def __call__(self) -> float:
        """Run both passes, or the forward pass alone, on new sequences; return the seconds."""
        given, cotangent = self._sequences()
        device = self.case.device
        start = now(device)
        with torch.set_grad_enabled(self.trains):
            out = self.module(given)[0]
        if self.trains:
            (out if isinstance(out, Tensor) else out.data).backward(cotangent)
        seconds = now(device) - start
        self.module.zero_grad()
        return seconds

    def _sequences(self) -> tuple[Tensor | PackedSequence, Tensor]:
        """Return the next input, and the cotangent of its output."""
        torch.manual_seed(self.case.seed + self.passes)
        self.passes += 1
        layer, device = self.layer, self.case.device
        lengths = _LENGTHS[layer.lengths](layer.batch, layer.steps)
        lengths[0] = layer.steps
        x = torch.randn(layer.steps, layer.batch, _INPUTS, device=device)
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        rows = x.shape[:2] if self.padded else packed.data.shape[:1]
        cotangent = torch.randn(*rows, layer.units * (2 if layer.both else 1), device=device)
        return x if self.padded else packed, cotangent


_OPTIONS: dict[str, Any] = {
    "subject": "layer",
    "rounds": 7,
    "runs": 1,
    "names": {"layer": "setting"},
    "across": "row",
}
_SIZES = "Sizes: sequences, steps of the longest, units. The lengths of the others are new in each pass."


@timed(
    kind="packed layer",
    metric=PASSES,
    title="packed sequences, training",
    legend=f"Both passes as a multiple of torch's on packed sequences. {_SIZES}",
    **_OPTIONS,
)
def packed_layers(case: Timing) -> Mapping[str, Callable[[], PackedPass]]:
    """Return, by label, functions that build the passes: packed and padded without an engine, packed with each."""
    make = partial(PackedPass, case)
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
