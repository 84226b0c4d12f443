"""When Newton's method is tried, and what a pass of it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradfree.chains.chain import Chain
from gradfree.chains.refusals import refuse_large_jacobians
from gradfree.convergence.outcome import Outcome, StoppingRule, within
from gradfree.convergence.passes import Pass
from gradfree.devices.costs import sweeps_worth


@dataclass(frozen=True)
class NewtonOptions:
    """The options of the engine ``newton``."""

    jacobian: str
    tolerance: float | None
    max_sweeps: int | None
    memory_limit: float

    def stopping(self, length: int, like: Tensor, kind: str) -> StoppingRule | None:
        """Return when to stop, or ``None`` if sweeps cannot be worth it; looks at no tensor.

        Args:
            length: T.
            like: a state, (B, H).
            kind: of the cell: :attr:`Recurrence.kind`.
        """
        if not length or not len(like):
            return None
        sweeps = self.max_sweeps or sweeps_worth(length, like, kind, self.jacobian)
        # As many as there are steps are exact.
        return StoppingRule(within(self.tolerance, like.dtype), min(sweeps, length)) if sweeps else None

    def takes_all(self, kind: str) -> bool:
        """Return whether K is all of F for cells of ``kind``."""
        return self.jacobian == "dense" or kind == "separate units"

    def refuse_large(self, path: str, length: int, first: Sequence[Tensor], kind: str) -> None:
        """Refuse dense Jacobians, or those that a diagonal is taken of, that need more than ``memory_limit``.

        Raises:
            ChainError: they do.
        """
        if self.jacobian == "dense" or (self.jacobian == "diagonal" and kind == "any"):
            state = torch.cat([part.flatten(0, -2) for part in first], -1)
            wide = torch.promote_types(state.dtype, torch.float32)
            refuse_large_jacobians(
                "newton", path, length - 1, state.to(wide), self.memory_limit, "the engine 'shooting'"
            )


class Solved(NamedTuple):
    """A pass that has run: how it went, or ``None`` if sequentially from the start."""

    this: Pass
    outcome: Outcome | None = None

    def record_outcome(self, chain: Chain) -> None:
        """Keep what it has shown, and offer its figures to those who ask."""
        if self.outcome is not None:
            self.this.report(chain, self.outcome)
            done = f"{self.outcome.sweeps} sweeps and would still change by {self.outcome.mismatches[-1]:.0e}"
        else:
            done = ""
        self.this.learn(
            self.outcome,
            f"does not settle: the {self.this.what} pass took {done}, and runs sequentially now. It tries Newton's "
            "method again now and then; max_sweeps allows more sweeps, the engine 'backprop' takes none.",
        )
