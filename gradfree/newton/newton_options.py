"""When Newton's method is tried, and what a pass of it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradfree.chains.chain import Chain
from gradfree.convergence.outcome import Outcome, StoppingRule, tolerance_for
from gradfree.convergence.passes import Pass
from gradfree.devices.costs import sweeps_worth


@dataclass(frozen=True)
class NewtonOptions:
    """The options of the engine ``newton``."""

    jacobian: str
    tolerance: float | None
    max_sweeps: int | None

    def stopping(self, length: int, like: Tensor, kind: str) -> StoppingRule | None:
        """Return when to stop, or ``None`` if sweeps cannot be worth it, as on cells of "any" kind; looks at no tensor.

        Args:
            length: T.
            like: a state, (B, H).
            kind: of the cell: :attr:`Recurrence.kind`.
        """
        if not length or not len(like) or kind == "any":
            return None
        sweeps = self.max_sweeps or sweeps_worth(length, like, kind)
        # As many as there are steps are exact.
        return StoppingRule(tolerance_for(self.tolerance, like.dtype), min(sweeps, length)) if sweeps else None


class NewtonPass(NamedTuple):
    """A pass that has run: how it went, or ``None`` if sequentially from the start."""

    chain_pass: Pass
    outcome: Outcome | None = None

    def record_outcome(self, chain: Chain) -> None:
        """Keep what it has shown, and offer its figures to those who ask."""
        if self.outcome is not None:
            self.chain_pass.report(chain, self.outcome)
            done = f"{self.outcome.sweeps} sweeps and would still change by {self.outcome.mismatches[-1]:.0e}"
        else:
            done = ""
        self.chain_pass.learn(
            self.outcome,
            f"does not settle: the {self.chain_pass.what} pass took {done}, and runs sequentially now. It tries "
            "Newton's method again now and then; max_sweeps allows more sweeps, the engine 'backprop' takes none.",
        )
