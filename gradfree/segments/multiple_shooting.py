"""Sweeps over segments until what leaves each of them is what its neighbour was entered by.

Multiple shooting (Bock & Plitt 1984); with the gates' product as corrector a parareal (Lions, Maday & Turinici 2001). A
sweep runs all segments at once from what enters them. The first of them is entered by what is known, so that k sweeps
behind the first run are exact in k + 1 segments, and as many sweeps as there are borders everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.algebra.time_scan import scan
from gradfree.convergence.outcome import Outcome, StoppingRule, relative


class SweepResult(NamedTuple):
    """What all segments at once have given.

    Attributes:
        result: whatever they are run for.
        leaving: what leaves each, part by part of the state, (C, B, H).
        largest: of the numbers that mismatches are relative to, for each part.
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
) -> tuple[Any, Outcome]:
    """Run all segments until their borders fit, or stopping says that it is no use; waits for the device once a run.

    Args:
        run: all segments, from what enters them.
        entering: the first guess, part by part, (C, B, H); what enters the first segment to run is right.
        stopping: when to stop.
        gate_products: returns the diagonals that carry a change at one border to the next, part by part, (C, B, H) or
            0.0. ``None``: changes are not carried on.
        reverse: whether segments run from the last to the first.

    Returns:
        The last run's result, and how it went.
    """
    outcome, factors = Outcome(), None
    here, there = (slice(None, -1), slice(1, None)) if reverse else (slice(1, None), slice(None, -1))
    while True:
        result, leaving, sizes = run(entering)
        jumps = [end[there] - start[here] for end, start in zip(leaving, entering, strict=True)]
        outcome.mismatches.append(relative(jumps, sizes))
        # As many sweeps as borders are exact by themselves.
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
