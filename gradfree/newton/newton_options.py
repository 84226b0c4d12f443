"""The options of Newton's method, and its finished passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradfree.chains.chain import Chain
from gradfree.convergence.outcome import Outcome, StoppingRule, tolerance_for
from gradfree.convergence.passes import Pass
from gradfree.devices.costs import newton_break_even_sweeps


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
        # As many sweeps as there are steps are always exact.
        return StoppingRule(tolerance_for(self.tolerance, like.dtype), min(sweeps, length)) if sweeps else None


class NewtonPass(NamedTuple):
    """A pass that has run, and its outcome; ``None`` if it ran sequentially from the start."""

    chain_pass: Pass
    outcome: Outcome | None = None

    def record_outcome(self, chain: Chain) -> None:
        """Report the outcome's figures, and pause Newton's method if it did not converge."""
        if self.outcome is not None:
            self.chain_pass.report(chain, self.outcome)
            error = f"an error of {self.outcome.mismatches[-1]:.0e} after {self.outcome.sweeps} sweeps"
        else:
            error = ""
        self.chain_pass.remember(
            self.outcome,
            f"does not converge: the {self.chain_pass.what} pass had {error}, and runs sequentially now. Newton's "
            "method is tried again from time to time. max_sweeps allows more sweeps; the engine 'backprop' needs none.",
        )
