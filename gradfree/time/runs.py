"""Packed sequences in runs of steps with the same batch size: each run is one padded batch without padding.

Sorted by length, a packed batch only gets smaller where a sequence ends. It consists of as many padded batches, one
after another, as there are different lengths. On a CPU torch takes packed sequences step by step, with a backward pass
whose cost grows with the square of the number of steps; it takes a padded batch in one kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RunSteps = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]
"""Maps inputs (S, b, I) and the parts of the initial state, (1, b, H) each, to outputs (S, b, H) and final states."""


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


def run_forwards(call: RunSteps, runs: Sequence[Run], x: Tensor, first: Sequence[Tensor]) -> list[Tensor]:
    """Run a layer in its forward direction; sequences that have ended leave the batch.

    Args:
        call: runs the layer on a padded batch.
        runs: of the packed rows.
        x: packed rows, (N, I).
        first: the parts of the initial state, (1, B, H) each.

    Returns:
        The outputs (N, H), and the final states, as ``first``.
    """
    state, outs, ended = [*first], [], []
    for run, rows in zip(runs, _pieces(x, runs), strict=True):
        ended.append([part[:, run.rows :] for part in state])
        out, *state = call(rows, [part[:, : run.rows] for part in state])
        outs.append(out.flatten(0, 1))
    ended.append(state)
    return [torch.cat(outs), *(torch.cat(part, 1) for part in zip(*reversed(ended), strict=True))]


def run_backwards(call: RunSteps, runs: Sequence[Run], x: Tensor, first: Sequence[Tensor]) -> list[Tensor]:
    """Run a layer in its reverse direction; sequences join the batch at their last step. As :func:`run_forwards`."""
    state, outs = [part[:, :0] for part in first], []
    for run, rows in zip(reversed(runs), reversed(_pieces(x, runs)), strict=True):
        joining = (given[:, part.shape[1] : run.rows] for given, part in zip(first, state, strict=True))
        state = [torch.cat(both, 1) for both in zip(state, joining, strict=True)]
        out, *state = call(rows.flip(0), state)
        outs.append(out.flip(0).flatten(0, 1))
    return [torch.cat(outs[::-1]), *state]


def _pieces(x: Tensor, runs: Sequence[Run]) -> list[Tensor]:
    """Return the rows of each run as a padded batch, (S, b, ·)."""
    return [rows.unflatten(0, run) for run, rows in zip(runs, x.split([s * b for s, b in runs]), strict=True)]
