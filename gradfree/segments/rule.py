"""When and how a chain in time is solved in segments: the options, and what the passes before have shown."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from gradfree.convergence.outcome import Outcome, StoppingRule, tolerance_for
from gradfree.convergence.passes import Pass
from gradfree.devices.costs import (
    ONEDNN,
    StepCost,
    best_count,
    is_torch_cell,
    kernel_cost,
    segments_pay,
    segments_worth,
    step_cost,
)
from gradfree.segments.lstm import LSTMGraph

_FIRST_BURN = 32


@dataclass(frozen=True)
class ChainPass(Pass):
    """What a rule decides on: one pass through one chain.

    Attributes:
        length: T.
        like: a state, (B, H), of the states' dtype and device.
        kind: of the cell: :attr:`~gradfree.time.forward.Recurrence.kind`.
        fused: whether it runs in a kernel of torch's for whole sequences.
        keeps_graph: whether it runs by oneDNN's LSTM, forward and backward.
    """

    length: int
    like: Tensor
    kind: str
    fused: bool = False
    keeps_graph: bool = False

    @property
    def cost(self) -> StepCost:
        """What a step takes."""
        if self.fused:
            return kernel_cost(self.like, self.kind)
        return step_cost(self.like.device, self.like.shape[1], is_torch_cell(self.kind))

    @property
    def burn(self) -> int:
        """The steps of a first guess that the last passes needed."""
        kept = self.memory.get(self._burn_key)
        return _FIRST_BURN if kept is None else int(kept)

    def set_burn(self, burn: int) -> None:
        """Let later passes start with a guess of ``burn`` steps."""
        # On the CPU whatever torch.set_default_device says, where to look is no wait.
        self.memory[self._burn_key] = torch.tensor(burn, device="cpu")

    @property
    def _burn_key(self) -> str:
        return f"burn {self.key}"


@dataclass(frozen=True)
class SegmentPlan:
    """How one pass is solved: ``count`` segments, a first guess of borders from ``burn`` steps, and when to stop."""

    count: int
    burn: int
    stopping: StoppingRule


class FinishedPass(NamedTuple):
    """A pass that has run: by which plan, and how it went; neither if sequentially from the start.

    A forward pass may leave a graph for the backward pass, an ``LSTMGraph``.
    """

    part: ChainPass
    plan: SegmentPlan | None = None
    outcome: Outcome | None = None
    graph: LSTMGraph | None = None


@dataclass(frozen=True)
class SegmentRule:
    """When and how to cut a chain; the fields are the options of the engine ``shooting``."""

    segments: int | str
    tolerance: float | None
    burn: int | str
    corrector: str | None
    max_sweeps: int | None

    def should_cut(self, part: ChainPass) -> bool:
        """Return whether such a pass is cut at all; looks at no tensor."""
        batch = len(part.like)
        if not batch:
            return False
        if isinstance(self.segments, int):
            return min(self.segments, part.length) > 1
        burn = self.burn if isinstance(self.burn, int) else _FIRST_BURN
        return segments_pay(part.length, batch, part.cost, burn)

    def plan(self, part: ChainPass, count: int | None = None) -> SegmentPlan | None:
        """Return how to solve ``part``, or ``None``: sequentially; changes nothing.

        Args:
            part: the pass.
            count: of segments, if that is given already.
        """
        if part.waits or not self.should_cut(part):
            return None
        batch, cost = len(part.like), part.cost
        burn = self.burn if isinstance(self.burn, int) else part.burn
        if count is None:
            # What goes back through the kernel leaves no step over.
            best = best_count(part.length, batch, ONEDNN if part.keeps_graph else cost, burn, whole=part.keeps_graph)
            count = self.segments if isinstance(self.segments, int) else best
        count = min(count, part.length)
        if self.max_sweeps is None:
            most, worth = count - 1, segments_worth(count, batch, cost)
        else:
            most, worth = min(self.max_sweeps, count - 1), inf
        stopping = StoppingRule(tolerance_for(self.tolerance, part.like.dtype), most, worth)
        return SegmentPlan(count, min(burn, part.length // count), stopping)

    def learn(self, finished: FinishedPass) -> None:
        """Keep what a pass has shown: a better burn, or that the chain does not forget; said the first time.

        Only backward passes call it, so that what a checkpoint runs forward again goes the way that it went first.
        """
        part, plan, outcome = finished[:3]
        failed = ""
        if plan is not None and outcome is not None:
            failed = (
                f"does not forget: the {part.what} pass in {plan.count} segments was off by "
                f"{outcome.mismatches[-1]:.0e} at a border after {outcome.sweeps} sweeps, and runs sequentially now. "
                "It tries segments again now and then; the engine 'backprop' never does."
            )
            if outcome.settled:
                part.set_burn(_better_burn(plan, outcome.mismatches[0], part.length))
        part.learn(outcome, failed)


def _better_burn(plan: SegmentPlan, mismatch: float, length: int) -> int:
    """Return the steps after which a start is forgotten to a tenth of the tolerance, in multiples of 8."""
    if not 0.0 < mismatch < 1.0:
        return plan.burn
    needed = plan.burn * log(plan.stopping.tolerance / 10) / log(mismatch)
    if mismatch <= plan.stopping.tolerance and needed > 0.7 * plan.burn:
        return plan.burn
    return max(8, min(8 * -(-int(needed) // 8), length // plan.count))
