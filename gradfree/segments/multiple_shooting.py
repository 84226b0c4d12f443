"""Sweeps over all segments until each segment's end equals the next segment's start.

This is multiple shooting (Bock & Plitt 1984). With the gates' product as corrector it is a parareal method (Lions,
Maday & Turinici 2001). A sweep runs all segments at once from their starts. The first segment's start is known, so k
sweeps after the first run make k + 1 segments exact. As many sweeps as there are borders make all of them exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.algebra.time_scan import scan
from gradfree.convergence.outcome import Outcome, StoppingRule, relative, relative_to_states, so_far


class SweepResult(NamedTuple):
    """The result of running all segments once.

    Attributes:
        result: outputs, cotangents or gradients, as the caller needs.
        leaving: each segment's end, part by part of the state, (C, B, H).
        largest: for each part, the largest number of each segment, (C,). A mismatch is relative to the largest one so
            far: in an expanding system a small error in small numbers is a large one later.
    """

    result: Any
    leaving: Sequence[Tensor]
    largest: Sequence[Tensor]


def solve_borders(
    run: Callable[[Sequence[Tensor]], SweepResult],
    entering: Sequence[Tensor],
    stopping: StoppingRule,
    gate_products: Callable[[], Sequence[Factor]] | None = None,
    reverse: bool = False,
    masks: bool = False,
) -> tuple[Any, Outcome]:
    """Run all segments until their borders agree, or until ``stopping`` gives up; one device sync for each run.

    Args:
        run: runs all segments from their starts.
        entering: the first guess of all starts, part by part, (C, B, H); that of the first segment must be exact.
        stopping: when to stop.
        gate_products: returns the diagonals that carry a change at one border to the next, part by part, (C, B, H) or
            0.0. ``None``: changes are not carried on.
        reverse: whether segments run from the last to the first.
        masks: whether states may contain masks, as those of steps that users write.

    Returns:
        The last run's result, and the outcome.
    """
    outcome, factors = Outcome(stopping.tolerance), None
    here, there = (slice(None, -1), slice(1, None)) if reverse else (slice(1, None), slice(None, -1))
    while True:
        result, leaving, sizes = run(entering)
        ends = [end[there] for end in leaving]
        jumps = [end - start[here] for end, start in zip(ends, entering, strict=True)]
        sizes = [so_far(size, reverse)[there] for size in sizes]
        outcome.mismatches.append(relative_to_states(jumps, ends, sizes) if masks else relative(jumps, sizes))
        # As many sweeps as there are borders are always exact.
        exact = outcome.sweeps == len(entering[0]) - 1 and isfinite(outcome.mismatches[-1])
        outcome.settled = exact or outcome.mismatches[-1] <= stopping.tolerance
        if outcome.settled or stopping.should_stop(outcome):
            return result, outcome
        if gate_products is not None:
            factors = gate_products() if factors is None else factors
            carried = zip(jumps, factors, strict=True)
            jumps = [scan(jump, d[:-1], reverse) if isinstance(d, Tensor) else jump for jump, d in carried]
        entering = [start.clone() for start in entering]
        for start, jump in zip(entering, jumps, strict=True):
            start[here] += jump
        outcome.sweeps += 1
