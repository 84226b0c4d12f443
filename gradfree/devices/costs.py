"""Cost rules: which of several methods is expected to be fastest, and the figures behind that.

A rule depends only on sizes and a device, never on values or a clock, so that two runs of one training make the same
choices. Figures for CPUs are measured. Figures for all other devices are estimates without measurements of ours; for
GPUs they follow what is published about cuDNN's kernels.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gradfree.devices.hardware import runs_cudnn

# Expected speed-up from which segments are used; covers the copies, which the cost model leaves out. Measured.
_MIN_GAIN = 1.5
# Remaining steps need copies, which the cost model leaves out: their factor on the time, measured as 1.15 to 1.3.
_REMAINDER_COST = 1.2

# A Newton sweep's time for one row, relative to a step's, and its start-up time, relative to a step's. Measured for
# torch's cells and for elementwise ones.
_SWEEP_ROW, _SWEEP_START = 3.0, 50.0
# The fewest sweeps that layers have been seen to need, if K is a part of F, and if K = F.
_FEWEST, _FEWEST_EXACT = 8, 3

# A sweep's start-up time in steps of a Python loop, and how many numbers of Jacobians take as long as such a step.
_NARROW_START, _NARROW_NUMBERS = 20.0, 4500.0

_PERSISTENT_UNITS = 192
"""Up to this number of units cuDNN keeps weights in registers; the time then grows with the batch size."""
_PERSISTENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes for which it does so."""

SHORTEST = 12
"""The fewest steps for which the closed form of ``backprop`` may be faster than torch's own kernel: measured."""

SHORTEST_EVALUATED = 64
"""The fewest steps for which a forward pass alone may gain: below, asking an engine takes a part of its time."""

_ONEDNN = 1.0
"""The free rows of oneDNN's LSTM, whose steps have almost no start-up time: measured."""


def free_rows(like: Tensor, kind: str, fused: bool) -> float:
    """Return how many rows of a forward step take as long as its start: measured on a CPU, else an estimate.

    Args:
        like: a state, (B, H), not read.
        kind: the kind of cell, :attr:`~gradfree.time.forward.Recurrence.kind`.
        fused: whether torch's kernel for whole sequences runs the steps; otherwise they are separate torch operations.
    """
    units = like.shape[1]
    if fused and runs_onednn(like, kind):
        return _ONEDNN
    if fused and runs_cudnn(like.device) and like.dtype in _PERSISTENT_DTYPES and units <= _PERSISTENT_UNITS:
        # 0.6 µs for a step of 64 units and about 0.01 µs for each row, also in segments.
        return 64.0
    if like.device.type != "cpu":
        return 2**25 / units**2
    # A step of another cell consists of more operations, so that its start-up time is longer.
    return (128.0 if kind in ("separate units", "any") else 16.0) * min(1.0, (64 / units) ** 0.5)


def runs_onednn(like: Tensor, kind: str) -> bool:
    """Return whether torch runs both passes of a layer of ``kind`` with states ``like`` by oneDNN."""
    taken = like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16)
    return kind == "LSTM" and taken and torch.backends.mkldnn.is_available()


def segments_pay(length: int, batch: int, free: float, burn: int) -> bool:
    """Return whether segments are expected to be faster; arguments as in :func:`best_count`.

    Not on oneDNN's LSTM: between CPUs they were 1.9 times faster and 2.9 times slower.
    """
    if length < 4 * burn or free <= _ONEDNN:
        return False
    count = best_count(length, batch, free, burn)
    return _MIN_GAIN * _segmented_cost(length, batch, free, count, burn) < length * _step_cost(batch, free)


@cache
def best_count(length: int, batch: int, free: float, burn: int) -> int:
    """Return the number of segments, at least 2, with the least time by the cost model.

    Args:
        length: T.
        batch: B.
        free: as :func:`free_rows` returns it.
        burn: the number of burn-in steps.
    """

    def time_of(count: int) -> float:
        return _segmented_cost(length, batch, free, count, burn)

    counts = range(2, max(3, min(1024, length // 8)))
    best = min(counts, key=time_of)
    # Of equally fast numbers the larger one: its steps have more rows, and may keep their gates.
    even = min((count for count in reversed(counts) if length % count == 0), key=time_of, default=best)
    return even if time_of(even) <= _REMAINDER_COST * time_of(best) else best


def break_even_sweeps(count: int, batch: int, free: float) -> float:
    """Return how many sweeps over ``count`` segments take as long as one sequential call."""
    return count * _step_cost(batch, free) / _step_cost(count * batch, free)


def _step_cost(rows: int, free: float) -> float:
    """Return the time of a step with ``rows`` rows, of all segments together, in units of its start-up time."""
    return 1 + rows / free


def _segmented_cost(length: int, batch: int, free: float, count: int, burn: int) -> float:
    """Return the time of a burn-in, one run of the segments and the remaining steps."""
    run = (length // count + burn) * _step_cost(count * batch, free)
    return run + length % count * _step_cost(batch, free)


def newton_break_even_sweeps(length: int, like: Tensor, kind: str) -> int:
    """Return how many Newton sweeps take as long as the sequential call, 0 if that is too few to converge.

    Args:
        length: T.
        like: a state, (B, H), on the chain's device; not read.
        kind: the kind of cell, :attr:`~gradfree.time.forward.Recurrence.kind`.
    """
    batch = len(like)
    free = _ONEDNN if kind == "LSTM" and like.device.type == "cpu" else free_rows(like, kind, fused=False)
    if kind == "separate units":
        # Its work grows with the number of units, not with its square; the start-up time of its steps is a loop's.
        free *= max(1.0, 64 / like.shape[1])
    worth = int(length * _step_cost(batch, free) / (_SWEEP_START + _SWEEP_ROW * length * batch / free))
    return worth if worth >= (_FEWEST_EXACT if kind == "separate units" else _FEWEST) else 0


def affordable_sweeps(length: int, rows: int, width: int) -> int:
    """Return how many sweeps of Newton's method over all steps of a loop take a tenth of the loop's time.

    A step of a loop in Python takes its start-up time, in both passes. A sweep takes that for each VJP, and a time for
    each number of the Jacobians.

    Args:
        length: T.
        rows: R, those of the carry.
        width: n, the numbers of a row.
    """
    return int(0.1 * length / (_NARROW_START + length * rows * width**2 / _NARROW_NUMBERS))


def batch_pays(device: torch.device, nodes: int, parameters: int, activations: int) -> bool:
    """Return whether equal modules run faster as one batch than one by one.

    One by one, each node of a module's graph costs a call. A batch saves these calls, but stacks copies of the
    parameters, and data that fits the cache for one small module does not for all.

    Args:
        device: where the modules are.
        nodes: the number of nodes in one module's graph.
        parameters: the number of elements of one module's parameters.
        activations: the number of elements that one module saves for the backward pass.
    """
    # Rough seconds on one CPU core, and on a current GPU.
    per_node, per_number = (15e-6, 1e-9) if device.type == "cpu" else (20e-6, 1e-11)
    return nodes * per_node > (parameters + activations) * per_number


def kept_gates_pay(x: Tensor, units: int) -> bool:
    """Return whether keeping a GRU's gates on a CPU is faster than recomputing them, and rounds as torch does.

    The bound on a step's work is measured: there the loop's overhead, about 10 µs for each step, equals the time of
    recomputing. Widths that are no multiple of 16 would round differently from torch.

    Args:
        x: the input, (T, B, I); not read.
        units: H.
    """
    return len(x) > 0 and units % 16 == 0 and x.shape[1] * units * (x.shape[2] + units) >= 5e5


def own_kernel_is_faster(kind: str, length: int, like: Tensor) -> bool:
    """Return whether both passes are faster in torch's own kernel than in the closed form of ``backprop``.

    Measured on one CPU thread. The closed form has a start-up time of 0.3 ms. It is faster on RNNs that are not wide,
    on narrow LSTMs that oneDNN does not run, and on GRUs, unless it runs batches in float16, wide batches under
    autocast, or computes the gates of many samples again (see :func:`kept_gates_pay`). On other devices this is an
    estimate: the closed form runs step by step in Python there.

    Args:
        kind: the torch cell.
        length: T.
        like: a state, (B, H); not read.
    """
    if like.device.type != "cpu" or length < SHORTEST:
        return True
    if kind == "LSTM":
        return runs_onednn(like, kind) or like.numel() > 512
    if kind == "GRU":
        if like.dtype is torch.float16 and len(like) >= 4:
            return True
        if torch.is_autocast_enabled("cpu") and like.numel() >= 2**11:
            return True
        return like.shape[1] % 16 != 0 and len(like) >= 32 and like.numel() >= 2**12
    return like.numel() >= 2**14
