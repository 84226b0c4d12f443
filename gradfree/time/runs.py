"""Packed sequences in runs of steps with the same batch size: each run is one padded batch without padding.

Sorted by length, a packed batch only gets smaller where a sequence ends. It consists of as many padded batches, one
after another, as there are different lengths. On a CPU torch takes packed sequences step by step, with a backward pass
whose cost grows with the square of the number of steps; it takes a padded batch in one kernel.

Neighbouring runs may be one call: the batch of the first run, padded. Only LSTMs take it: an additional input keeps c
on padding, unless their weights are enormous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfree.time.packing import Packing
from gradfree.torchside.private import is_simulated

_SATURATED = 1e4
"""A pre-activation at which a sigmoid is exactly 0 (negative) or 1."""

RunSteps = Callable[[Tensor, Sequence[Tensor], Sequence[Any]], Sequence[Tensor]]
"""Maps inputs (S, b, I), the parts of the initial state, (1, b, H) each, and weights to outputs (S, b, H) and final
states. Where there is padding, inputs and weights have one more column: see :func:`keeping_c`."""


class Run(NamedTuple):
    """Consecutive steps of packed sequences with the same batch size."""

    steps: int
    rows: int


def runs_of(batch_sizes: Tensor) -> list[Run]:
    """Return the runs of packed sequences, the largest batch first; ``batch_sizes`` as in ``PackedSequence``."""
    sizes = batch_sizes.tolist()
    # Batch sizes only fall: all are equal if these are. Counting takes several times as long as the list.
    if sizes[0] == sizes[-1]:
        return [Run(len(sizes), sizes[0])]
    return [Run(steps, rows) for rows, steps in Counter(sizes).items()]


def run_forwards(
    call: RunSteps, calls: Sequence[Sequence[Run]], x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]
) -> list[Tensor]:
    """Run a layer in its forward direction; sequences that have ended leave the batch.

    Args:
        call: runs the layer on a padded batch.
        calls: the runs of the packed rows, neighbours that are one call together.
        x: packed rows, (N, I).
        first: the parts of the initial state, (1, B, H) each.
        weights: of the layer, in this direction.

    Returns:
        The outputs (N, H), and the final states, as ``first``.
    """
    calls, state, ended = _possible(calls, weights), [*first], []
    outs: list[Tensor] = []
    for runs, rows in zip(calls, _rows_of(x, calls), strict=True):
        most = runs[0].rows
        if outs:
            ended.append([part[:, most:] for part in state])
        out, *state = _run_call(call, runs, rows, [part[:, :most] for part in state], weights, reverse=False)
        outs.append(out)
    ended.append(state)
    return [torch.cat(outs), *(torch.cat(part, 1) for part in zip(*reversed(ended), strict=True))]


def run_backwards(
    call: RunSteps, calls: Sequence[Sequence[Run]], x: Tensor, first: Sequence[Tensor], weights: Sequence[Any]
) -> list[Tensor]:
    """Run a layer in its reverse direction; sequences join the batch at their last step. As :func:`run_forwards`.

    Where a call has several runs, the initial state must be zero: on padding h does not stay, but is 0 where c is.
    """
    calls, state, outs = _possible(calls, weights), [part[:, :0] for part in first], []
    for runs, rows in zip(reversed(calls), reversed(_rows_of(x, calls)), strict=True):
        joining = (given[:, part.shape[1] : runs[0].rows] for given, part in zip(first, state, strict=True))
        state = [torch.cat(both, 1) for both in zip(state, joining, strict=True)]
        out, *state = _run_call(call, runs, rows, state, weights, reverse=True)
        outs.append(out)
    return [torch.cat(outs[::-1]), *state]


def _run_call(
    call: RunSteps,
    runs: Sequence[Run],
    rows: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Any],
    reverse: bool,
) -> Sequence[Tensor]:
    """Run packed rows in one call; return the packed outputs and the states after the last step of each sequence."""
    if len(runs) == 1:
        out, *state = call(_flipped(rows.unflatten(0, runs[0]), reverse), state, weights)
        return [_flipped(out, reverse).flatten(0, 1), *state]
    steps, sizes = torch.tensor(runs, device="cpu").unbind(1)
    packing = Packing(sizes.repeat_interleave(steps), rows.device)
    x = torch.cat([packing.pad(rows), (~packing.valid).to(rows.dtype)], -1)
    out, *state = call(_flipped(x, reverse), state, keeping_c(weights, state[0].shape[-1]))
    out = _flipped(out, reverse)
    if not reverse:
        state[0] = out.flatten(0, 1).index_select(0, packing.last)[None]
    return [packing.pack(out), *state]


def can_keep_c(weights: Sequence[Any]) -> bool:
    """Return whether :func:`keeping_c` saturates the gates of an LSTM: whatever h in (-1, 1), nothing else is as large.

    Args:
        weights: as those of a recurrent module, of one layer and direction.
    """
    _, hidden, *biases = (weight.detach() for weight in weights)
    if is_simulated(hidden):
        return True
    largest = hidden.abs().sum(1) + sum(bias.abs() for bias in biases)
    # False for NaN, too.
    return bool((largest < _SATURATED / 2).all())


def keeping_c(weights: Sequence[Any], units: int) -> list[Any]:
    """Return the weights of an LSTM in one direction with one more input. Where it is 1, and x is 0, c stays.

    Args:
        weights: as those of a recurrent module, of one layer and direction, which :func:`can_keep_c`.
        units: H.
    """
    gates = weights[0].new_tensor([-_SATURATED, _SATURATED, 0.0, 0.0]).repeat_interleave(units)
    return [torch.cat([weights[0], gates[:, None]], 1), *weights[1:]]


def _possible(calls: Sequence[Sequence[Run]], weights: Sequence[Any]) -> Sequence[Sequence[Run]]:
    """Return ``calls``, or each run as one call if c would not stay on their padding."""
    if all(len(runs) == 1 for runs in calls) or can_keep_c(weights):
        return calls
    return [[run] for runs in calls for run in runs]


def _rows_of(x: Tensor, calls: Sequence[Sequence[Run]]) -> Sequence[Tensor]:
    """Return the packed rows of each call."""
    return x.split([sum(steps * rows for steps, rows in runs) for runs in calls])


def _flipped(x: Tensor, reverse: bool) -> Tensor:
    return x.flip(0) if reverse else x
