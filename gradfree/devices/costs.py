"""Costs: the numbers of each type of device, and the rules of sizes that choose between methods by them.

A rule depends only on sizes and a device, never on values or a clock, so that two runs of one training make the same
choices. The numbers of CPUs are measured; ``benchmarks/scripts/costs.py`` measures them again and prints them beside
these. Those of all other devices are estimates; for GPUs they follow what is published about cuDNN's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gradfree.devices.hardware import runs_cudnn

UNLIMITED = 2**62
"""In place of a bound where there is none."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The numbers of one type of device.

    Attributes:
        rows: how many rows of a step of torch's cells with 64 units take as long as its start.
        rows_of_any: the same for other cells, whose steps consist of more operations.
        rows_power: with more units there are fewer such rows, by this power of their number.
        fewest_units: with fewer units there are as many such rows as with so many.
        rows_of_onednn: such rows of oneDNN's LSTM, whose steps have almost no start-up time.
        rows_of_persistent: such rows of cuDNN's kernels that keep weights in registers, also in segments.
        persistent_units: up to so many units they do.
        sweep_row: the time of a Newton sweep for each row of a step, relative to that of a step.
        sweep_start: the start-up time of a Newton sweep, relative to that of a step.
        loop_sweep_start: that of a sweep over a loop in Python, in steps of the loop.
        loop_sweep_numbers: so many numbers of its Jacobians take as long as a step of the loop.
        node: seconds that a batch of equal modules saves for each node in a module's graph.
        number: seconds that it costs for each element of a module's parameters and of what the module saves.
        separate_walks: up to so many blocks, one call of autograd for each is faster than one for all.
        kept_gates: from so many multiplications in a step of a GRU on, keeping the gates is faster than recomputing.
        closed_rnn: up to so many numbers of a state, the closed form of an RNN is faster than torch's kernel.
        closed_lstm: the same for an LSTM that oneDNN does not run.
        closed_gru_autocast: the same for a GRU under autocast.
        closed_gru_unaligned: the same for a GRU whose gates are not kept, with ``closed_gru_unaligned_rows`` or more.
        closed_gru_unaligned_rows: with fewer rows such a GRU's closed form is always faster.
        closed_gru_half_rows: with so many rows or more in float16, a GRU's closed form is slower.
        scan_numbers: from so many numbers of a step on, a linear recurrence runs step by step.
        chunk_numbers: a Newton sweep runs in chunks of steps with so many numbers of a state, which fit the caches.
        cached_numbers: local derivatives of a GRU are computed in chunks of so many numbers.
    """

    rows: float
    rows_of_any: float
    rows_power: float
    fewest_units: int
    rows_of_onednn: float
    rows_of_persistent: float
    persistent_units: int
    sweep_row: float = 3.0
    sweep_start: float = 50.0
    loop_sweep_start: float = 20.0
    loop_sweep_numbers: float = 4500.0
    node: float
    number: float
    separate_walks: int = 32
    kept_gates: float
    closed_rnn: int
    closed_lstm: int
    closed_gru_autocast: int
    closed_gru_unaligned: int
    closed_gru_unaligned_rows: int
    closed_gru_half_rows: int
    scan_numbers: int
    chunk_numbers: int
    cached_numbers: int = 2**17


CPU = Costs(
    rows=16.0,
    rows_of_any=128.0,
    rows_power=0.5,
    fewest_units=64,
    rows_of_onednn=1.0,
    rows_of_persistent=0.0,
    persistent_units=0,
    node=15e-6,
    number=1e-9,
    kept_gates=5e5,
    closed_rnn=2**14 - 1,
    closed_lstm=512,
    closed_gru_autocast=2**11 - 1,
    closed_gru_unaligned=2**12 - 1,
    closed_gru_unaligned_rows=32,
    closed_gru_half_rows=4,
    scan_numbers=2**14,
    chunk_numbers=2**16,
)
"""Measured on CPUs, with one thread."""

GPU = Costs(
    rows=8192.0,
    rows_of_any=8192.0,
    rows_power=2.0,
    fewest_units=1,
    rows_of_onednn=0.0,
    # 0.6 µs for a step of 64 units, and about 0.01 µs for each row.
    rows_of_persistent=64.0,
    persistent_units=192,
    node=20e-6,
    number=1e-11,
    # The closed form runs step by step in Python there.
    kept_gates=UNLIMITED,
    closed_rnn=0,
    closed_lstm=0,
    closed_gru_autocast=0,
    closed_gru_unaligned=0,
    closed_gru_unaligned_rows=0,
    closed_gru_half_rows=0,
    scan_numbers=UNLIMITED,
    chunk_numbers=UNLIMITED,
)
"""Estimates for GPUs and all other devices."""

TABLES = {"cpu": CPU}
"""The measured tables, by type of device."""

# The same on every device.
MIN_GAIN = 1.5
"""Expected speed-up from which segments are used; covers the copies, which the cost model leaves out."""
REMAINDER_COST = 1.2
"""The factor of a remaining step's copies on the time, which the cost model leaves out."""
FEWEST_SWEEPS = 8
"""The fewest Newton sweeps that layers need, if K is a part of F."""
FEWEST_EXACT_SWEEPS = 4
"""The same if K = F."""
SHORTEST = 12
"""The fewest steps for which the closed form of ``backprop`` may be faster than torch's own kernel."""
SHORTEST_EVALUATED = 64
"""The fewest steps for which a forward pass alone may gain: below, asking an engine takes a part of its time."""
SHORTEST_SCAN = 128
"""The fewest steps of a loop that may be faster in segments."""

_PERSISTENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes for which cuDNN keeps weights in registers."""


def costs_of(device: torch.device) -> Costs:
    """Return the numbers of a device."""
    return TABLES.get(device.type, GPU)


def free_rows(like: Tensor, kind: str, fused: bool) -> float:
    """Return R such that a forward step with n rows takes 1 + n / R times its start: measured on a CPU, else estimated.

    Args:
        like: a state, (B, H), not read.
        kind: the kind of cell, :attr:`~gradfree.time.forward.Recurrence.kind`.
        fused: whether torch's kernel for whole sequences runs the steps; otherwise they are separate torch operations.
    """
    costs, units = costs_of(like.device), like.shape[1]
    if fused and runs_onednn(like, kind):
        return costs.rows_of_onednn
    if fused and runs_cudnn(like.device) and like.dtype in _PERSISTENT_DTYPES and units <= costs.persistent_units:
        return costs.rows_of_persistent
    rows = costs.rows_of_any if kind in ("separate units", "any") else costs.rows
    return rows * (64 / max(units, costs.fewest_units)) ** costs.rows_power


def runs_onednn(like: Tensor, kind: str) -> bool:
    """Return whether torch runs both passes of a layer of ``kind`` with states ``like`` by oneDNN."""
    taken = like.device.type == "cpu" and like.dtype in (torch.float32, torch.bfloat16)
    return kind == "LSTM" and taken and torch.backends.mkldnn.is_available()


def segments_pay(length: int, batch: int, free: float, burn: int) -> bool:
    """Return whether segments are expected to be faster; arguments as in :func:`best_count`.

    Not on oneDNN's LSTM: between CPUs they were 1.9 times faster and 2.9 times slower.
    """
    if length < 4 * burn or free <= CPU.rows_of_onednn:
        return False
    count = best_count(length, batch, free, burn)
    return MIN_GAIN * _segmented_cost(length, batch, free, count, burn) < length * _step_cost(batch, free)


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
    return even if time_of(even) <= REMAINDER_COST * time_of(best) else best


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
    batch, costs = len(like), costs_of(like.device)
    by_onednn = kind == "LSTM" and like.device.type == "cpu"
    free = costs.rows_of_onednn if by_onednn else free_rows(like, kind, fused=False)
    if kind == "separate units":
        # The work of its steps grows with the number of units, not with its square.
        free = costs.rows_of_any * 64 / max(1, like.shape[1])
    worth = int(length * _step_cost(batch, free) / (costs.sweep_start + costs.sweep_row * length * batch / free))
    return worth if worth >= (FEWEST_EXACT_SWEEPS if kind == "separate units" else FEWEST_SWEEPS) else 0


def affordable_sweeps(device: torch.device, length: int, rows: int, width: int) -> int:
    """Return how many sweeps of Newton's method over all steps of a loop take a tenth of the loop's time.

    A step of a loop in Python takes its start-up time, in both passes. A sweep takes that for each VJP, and a time for
    each number of the Jacobians.

    Args:
        device: of the carry.
        length: T.
        rows: R, those of the carry.
        width: n, the numbers of a row.
    """
    costs = costs_of(device)
    return int(0.1 * length / (costs.loop_sweep_start + length * rows * width**2 / costs.loop_sweep_numbers))


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
    costs = costs_of(device)
    return nodes * costs.node > (parameters + activations) * costs.number


def kept_gates_pay(x: Tensor, units: int) -> bool:
    """Return whether keeping a GRU's gates on a CPU is faster than recomputing them, and rounds as torch does.

    At the bound the loop's overhead, about 10 µs for each step, equals the time of recomputing. Widths that are no
    multiple of 16 would round differently from torch.

    Args:
        x: the input, (T, B, I); not read.
        units: H.
    """
    work = x.shape[1] * units * (x.shape[2] + units)
    return len(x) > 0 and units % 16 == 0 and work >= costs_of(x.device).kept_gates


def own_kernel_is_faster(kind: str, length: int, like: Tensor) -> bool:
    """Return whether both passes are faster in torch's own kernel than in the closed form of ``backprop``.

    The closed form has a start-up time of 0.3 ms. On a CPU it is faster on RNNs that are not wide, on narrow LSTMs that
    oneDNN does not run, and on GRUs, unless it runs batches in float16, wide batches under autocast, or computes the
    gates of many samples again (see :func:`kept_gates_pay`).

    Args:
        kind: the torch cell.
        length: T.
        like: a state, (B, H); not read.
    """
    costs, numbers = costs_of(like.device), like.numel()
    if like.device.type != "cpu" or length < SHORTEST:
        return True
    if kind == "LSTM":
        return runs_onednn(like, kind) or numbers > costs.closed_lstm
    if kind == "GRU":
        if like.dtype is torch.float16 and len(like) >= costs.closed_gru_half_rows:
            return True
        if torch.is_autocast_enabled("cpu") and numbers > costs.closed_gru_autocast:
            return True
        many = len(like) >= costs.closed_gru_unaligned_rows and numbers > costs.closed_gru_unaligned
        return like.shape[1] % 16 != 0 and many
    return numbers > costs.closed_rnn
