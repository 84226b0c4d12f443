"""When something pays: all rules of cost, and their figures.

A rule takes sizes and a device, and looks at no tensor and no clock: two runs of one training would differ in their
last digits. Figures of CPUs are measured. Those of every other device are estimates that no measurement of ours backs
yet: on GPUs by what is published of cuDNN's kernels.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradfree.devices.hardware import runs_cudnn

# What segments must promise to win, for the copies into segments that the model leaves out: measured.
_MIN_GAIN = 1.5
# What steps that are left over cost at most beside the model, for copies that they need: measured, 1.15 to 1.3.
_REMAINDER_COST = 1.2

# What a sweep of Newton's method takes for a row, in multiples of what a step takes for it, and to start, in starts of
# a step: measured for torch's own cells and for those with separate units.
_SWEEP_ROW, _SWEEP_START = 3.0, 50.0
# Layers have not been seen to take fewer sweeps, with K a part of F, and with all of it.
_FEWEST, _FEWEST_EXACT = 8, 3

_PERSISTENT_UNITS = 192
"""Up to so many units cuDNN keeps the weights in registers, where each row of a batch costs."""
_PERSISTENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of what it keeps there."""


class StepCost(NamedTuple):
    """What a step of a recurrence takes, in starts of a step of segments.

    Attributes:
        free: the rows of a batch whose work takes as long as a step of segments takes to start.
        start: what a step of the sequential call takes to start.
        row: what it takes for a row; ``None`` for as much as in segments.
    """

    free: float
    start: float = 1.0
    row: float | None = None

    def sequential(self, batch: int) -> float:
        """Return what a step of the sequential call takes."""
        return self.start + batch * (1 / self.free if self.row is None else self.row)

    def segments(self, rows: int) -> float:
        """Return what a step of segments takes that have so many rows together."""
        return 1 + rows / self.free


ONEDNN = StepCost(1.0)
"""Of oneDNN's LSTM, whose steps start at once: measured."""


def step_cost(device: torch.device, units: int, known: bool) -> StepCost:
    """Return the cost of a step in small operations: measured on a CPU, an estimate elsewhere.

    Args:
        device: where the chain runs.
        units: H.
        known: whether the cell is one of torch's own.
    """
    if device.type != "cpu":
        return StepCost(2**25 / units**2)
    return StepCost((16.0 if known else 128.0) * min(1.0, (64 / units) ** 0.5))


def kernel_cost(like: Tensor, kind: str) -> StepCost:
    """Return the cost of a forward step in a kernel of torch's for whole sequences: an estimate but on a CPU.

    Args:
        like: a state, (B, H), not read.
        kind: which of torch's own cells it runs.
    """
    batch, units = like.shape
    if runs_onednn(like, kind):
        return ONEDNN
    usual = step_cost(like.device, units, known=True)
    if not runs_cudnn(like.device) or like.dtype not in _PERSISTENT_DTYPES:
        return usual
    if units <= _PERSISTENT_UNITS:
        # 0.6 µs a step of 64 units, and some 0.01 µs for a row, in segments too.
        return StepCost(64.0)
    if kind == "LSTM" and like.dtype is torch.float16 and units % 128 == 0 and batch % 8 == 0 and batch <= 128:
        # 2 µs a step by a kernel that takes no larger batch.
        return StepCost(usual.free, start=0.2)
    return usual


def runs_onednn(like: Tensor, kind: str) -> bool:
    """Return whether torch has oneDNN's kernel, both passes, for a layer of ``kind`` with states ``like``."""
    exact = like.device.type == "cpu" and like.dtype is torch.float32
    return kind == "LSTM" and exact and torch.backends.mkldnn.is_available()


def is_torch_cell(kind: str) -> bool:
    """Return whether ``kind`` is one of torch's own cells."""
    return kind not in ("separate units", "any")


def segments_pay(length: int, batch: int, cost: StepCost, burn: int) -> bool:
    """Return whether segments are expected to win; arguments as those of :func:`best_count`."""
    if length < 4 * burn:
        return False
    count = best_count(length, batch, cost, burn)
    return _MIN_GAIN * _segmented_cost(length, batch, cost, count, burn) < length * cost.sequential(batch)


@cache
def best_count(length: int, batch: int, cost: StepCost, burn: int, whole: bool = False) -> int:
    """Return the number of segments, at least 2, in which ``length`` steps run fastest by the model.

    Args:
        length: T.
        batch: B.
        cost: of a step.
        burn: the steps that the first guess takes.
        whole: whether only numbers that leave no step over will do, if there are any.
    """

    def taken(count: int) -> float:
        return _segmented_cost(length, batch, cost, count, burn)

    counts = range(2, max(3, min(1024, length // 8)))
    best = min(counts, key=taken)
    # Of two as good ones the larger: its steps have more rows, and may keep their gates.
    even = min((count for count in reversed(counts) if length % count == 0), key=taken, default=best)
    return even if whole or taken(even) <= _REMAINDER_COST * taken(best) else best


def segments_worth(count: int, batch: int, cost: StepCost) -> float:
    """Return how many sweeps of ``count`` segments take as long as one sequential call."""
    return count * cost.sequential(batch) / cost.segments(count * batch)


def _segmented_cost(length: int, batch: int, cost: StepCost, count: int, burn: int) -> float:
    """Return what a guess, a run in segments and the steps that are left over take."""
    return (length // count + burn) * cost.segments(count * batch) + length % count * cost.sequential(batch)


def sweeps_worth(length: int, like: Tensor, kind: str) -> int:
    """Return how many of Newton's sweeps take as long as the sequential call, 0 if too few.

    Args:
        length: T.
        like: a state, (B, H), on the device in question; not read.
        kind: of the cell: :attr:`~gradfree.time.forward.Recurrence.kind`.
    """
    batch, units = like.shape
    cost = (
        ONEDNN if kind == "LSTM" and like.device.type == "cpu" else step_cost(like.device, units, is_torch_cell(kind))
    )
    worth = int(length * cost.sequential(batch) / (_SWEEP_START + _SWEEP_ROW * length * batch / cost.free))
    return worth if worth >= (_FEWEST_EXACT if kind == "separate units" else _FEWEST) else 0


# In seconds, roughly those of one core and of any GPU of today.
_SECONDS_PER_NODE = {"cpu": 15e-6}
_SECONDS_PER_NUMBER = {"cpu": 1e-9}


def batch_pays(device: torch.device, nodes: int, parameters: int, activations: int) -> bool:
    """Return whether modules that are alike are sooner done in a batch.

    One after the other, each of the nodes of a module's graph costs a call. In a batch nothing does, but parameters
    are copied side by side, and what a small module kept in the cache goes through memory.

    Args:
        device: where they are.
        nodes: of one module's graph.
        parameters: how many numbers one module has.
        activations: how many numbers one module keeps.
    """
    return nodes * _SECONDS_PER_NODE.get(device.type, 20e-6) > (parameters + activations) * _SECONDS_PER_NUMBER.get(
        device.type, 1e-11
    )


def kept_gates_pay(x: Tensor, units: int) -> bool:
    """Return whether keeping a GRU's gates is possible and faster than recomputing them.

    The bound on the work of a step is measured: there the loop's overhead, some 10 µs a step, is what the products
    take. Other widths than multiples of 16 round differently at the ends of vectors; other dtypes are slow.

    Args:
        x: the input, (T, B, I); not read.
        units: H.
    """
    exact = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and units % 16 == 0
    work = x.shape[1] * units * (x.shape[2] + units)
    return exact and len(x) > 0 and work >= 5e5 and not torch.is_autocast_enabled("cpu")


def own_kernel_is_faster(kind: str, length: int, like: Tensor, packed: bool) -> bool:
    """Return whether torch's own kernel takes less time, both passes, than the closed form of ``backprop``.

    Measured on one thread of a CPU: the closed form takes 0.3 ms to start
    with. It wins on GRUs of any width, on RNNs that are not wide, and on narrow LSTMs for which there is no kernel of
    oneDNN's. On other devices it goes step by step in Python: an estimate.

    Args:
        kind: which of torch's own cells it is.
        length: T.
        like: a state, (B, H); not read.
        packed: whether sequences are packed, of several lengths.
    """
    if like.device.type != "cpu" or length < 12:
        return True
    if kind == "LSTM":
        return (not packed and runs_onednn(like, kind)) or like.numel() > 512
    return kind != "GRU" and like.numel() >= 2**14
