"""Sweeps over all steps at once until they change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, log, nan

from torch import Tensor

from gradfree.convergence.outcome import Outcome, StoppingRule, largest, relative

# Where sweeps change less so slowly, what they leave is anybody's guess.
_MAX_REMAINING = 10.0


def iterate(
    sweep: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    state: Sequence[Tensor],
    stopping: StoppingRule,
    inputs: Sequence[Tensor],
    exact_jacobian: bool,
) -> tuple[Sequence[Tensor], Outcome]:
    """Sweep until the state changes by less than the tolerance, or it is no use; waits for the device once a sweep.

    Args:
        sweep: returns a new state, exact in one step more than the one that it is given.
        state: the first guess, part by part, (T, B, H).
        stopping: when to stop.
        inputs: what is finite unless bad input is not.
        exact_jacobian: whether K is all of F, so that sweeps are Newton's own and get better faster and faster.

    Returns:
        The state, and how it went; a mismatch is what the sweeps that would follow are expected to change. It is
        infinite, not NaN, where numbers that were given are finite.
    """
    outcome, changes = Outcome(), list[float]()
    while True:
        old, state = state, sweep(state)
        outcome.sweeps += 1
        jumps = [new - part for new, part in zip(state, old, strict=True)]
        changes.append(relative(jumps, [largest(new) for new in state]))
        if isfinite(changes[-1]):
            outcome.mismatches.append(changes[-1] * _remaining_change(changes, exact_jacobian))
        else:
            outcome.mismatches.append(inf if all(isfinite(largest(part).item()) for part in inputs) else nan)
        exact = outcome.sweeps >= len(state[0]) and isfinite(changes[-1])
        outcome.settled = exact or outcome.mismatches[-1] <= stopping.tolerance
        if outcome.settled or stopping.should_stop(outcome):
            return state, outcome


def _remaining_change(changes: Sequence[float], exact_jacobian: bool) -> float:
    """Return what sweeps have left to change, in multiples of the last change: of a geometric row, or at once nothing.

    Quasi-Newton sweeps may slow down again, so that less than the last change is not trusted.
    """
    *_, third, second, last = (inf, inf, *changes)
    if second in (0.0, inf) or last >= second:
        return 1.0 if second == inf else _MAX_REMAINING
    rate = last / second
    if not exact_jacobian:
        return min(max(1.0, rate / (1 - rate)), _MAX_REMAINING)
    faster = second < third < inf and rate > 0.0
    order = min(max(log(rate) / log(second / third), 1.0), 2.0) if faster else 1.0
    return min(rate**order / (1 - rate), _MAX_REMAINING)
