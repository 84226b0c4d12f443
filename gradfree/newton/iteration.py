"""Sweeps over all steps at once until convergence: options and stopping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan

from torch import Tensor

from gradfree.convergence.outcome import Outcome, StoppingRule, largest, relative, relative_to_states, tolerance_for
from gradfree.devices.costs import newton_break_even_sweeps
from gradfree.devices.hardware import product_rounding

# Limits the estimate of the remaining change, in multiples of the last: with slow convergence it is unreliable.
_MAX_REMAINING = 10.0
# So many sweeps of an elementwise cell may bring no progress, even if they take more than a tenth of the loop's time.
_PATIENCE = 8


@dataclass(frozen=True)
class NewtonRule(StoppingRule):
    """When Newton's method gives up.

    Attributes:
        patience: after so many sweeps each further one must halve the mismatch.
    """

    patience: int = 0

    def should_stop(self, outcome: Outcome) -> bool:
        """Return whether to give up."""
        *_, before, last = (inf, *outcome.mismatches)
        late = outcome.sweeps >= self.patience and not last <= before / 2
        return late or outcome.sweeps >= self.most or not isfinite(last)


@dataclass(frozen=True)
class NewtonOptions:
    """The options of the engine ``newton``."""

    jacobian: str
    tolerance: float | None
    max_sweeps: int | None

    def stopping(self, length: int, like: Tensor, kind: str) -> StoppingRule | None:
        """Return when to stop, or ``None`` if sweeps cannot pay; decides by sizes only, without a sync.

        Args:
            length: T.
            like: a state, (B, H).
            kind: the kind of cell, :attr:`Recurrence.kind`; sweeps never pay for "any".
        """
        if not length or not len(like) or kind == "any":
            return None
        sweeps = self.max_sweeps or newton_break_even_sweeps(length, like, kind)
        if not sweeps:
            return None
        most = min(sweeps, length)  # As many sweeps as there are steps are always exact.
        if kind != "separate units":
            tolerance = tolerance_for(self.tolerance, like.dtype, product_rounding(like.device, like.dtype))
            return StoppingRule(tolerance, most)
        patience = sweeps if self.max_sweeps is not None else max(_PATIENCE, sweeps // 10)
        # Such a cell has no product with a state, whose factors would be rounded.
        return NewtonRule(tolerance_for(self.tolerance, like.dtype), most, patience=patience)


def iterate(
    sweep: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    state: Sequence[Tensor],
    stopping: StoppingRule,
    inputs: Sequence[Tensor],
    masks: bool = False,
) -> tuple[Sequence[Tensor], Outcome]:
    """Sweep until the remaining change is below the tolerance, or ``stopping`` gives up; one device sync each sweep.

    Args:
        sweep: returns a new state that is exact in one step more than its argument.
        state: the first guess, part by part, (T, B, H).
        stopping: when to stop.
        inputs: tensors that are finite if the user's input is.
        masks: whether it may contain masks, as the states of cells that users write.

    Returns:
        The state, and the outcome. A mismatch is the expected change by all further sweeps. If it is not finite, it is
        infinite for finite ``inputs`` and NaN otherwise.
    """
    outcome, changes = Outcome(stopping.tolerance), list[float]()
    while True:
        old, state = state, sweep(state)
        outcome.sweeps += 1
        jumps, sizes = [new - part for new, part in zip(state, old, strict=True)], [largest(new) for new in state]
        changes.append(relative_to_states(jumps, state, sizes) if masks else relative(jumps, sizes))
        if isfinite(changes[-1]):
            outcome.mismatches.append(changes[-1] * remaining_change(changes))
        else:
            outcome.mismatches.append(inf if all(isfinite(largest(part).item()) for part in inputs) else nan)
        exact = outcome.sweeps >= len(state[0]) and isfinite(changes[-1])
        outcome.settled = exact or outcome.mismatches[-1] <= stopping.tolerance
        if outcome.settled or stopping.should_stop(outcome):
            return state, outcome


def remaining_change(changes: Sequence[float]) -> float:
    """Return the expected change by all further sweeps, in multiples of the last change.

    Takes the changes as a geometric series, but at least the last one again: sweeps may slow down, and where K is all
    of F a step whose change was small may yet have the largest.
    """
    if len(changes) == 1:
        return 1.0
    second, last = changes[-2:]
    rate = last / second if second else inf
    return _MAX_REMAINING if rate >= 1 else min(max(1.0, rate / (1 - rate)), _MAX_REMAINING)
