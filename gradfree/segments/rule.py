"""When and how to solve a chain in time in segments: by options, costs, and the outcomes of earlier passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf, log

import torch
from torch import Tensor

from gradfree.convergence.outcome import Outcome, StoppingRule, tolerance_for
from gradfree.convergence.passes import Pass
from gradfree.devices.costs import best_count, break_even_sweeps, free_rows, segments_pay
from gradfree.devices.hardware import product_rounding

_FIRST_BURN = 32


@dataclass
class ChainPass(Pass):
    """One pass through one chain, and the sizes that decide how it is solved.

    Attributes:
        length: T.
        like: a state, (B, H), of the states' dtype and device.
        kind: the kind of cell, :attr:`~gradfree.time.forward.Recurrence.kind`.
        fused: whether one of torch's kernels runs whole sequences.
        plan: how it was solved; ``None`` as :attr:`outcome`.
    """

    failure = "has long memory"

    length: int
    like: Tensor
    kind: str
    fused: bool = False
    plan: SegmentPlan | None = field(default=None, init=False)

    @cached_property
    def free(self) -> float:
        """How many rows of a step take as long as its start."""
        return free_rows(self.like, self.kind, self.fused)

    @property
    def rounding(self) -> float:
        """How coarsely a step's matrix products round their factors."""
        if self.kind == "separate units":
            return 0.0
        return product_rounding(self.like.device, self.like.dtype, by_kernel=self.fused)

    @property
    def burn(self) -> int:
        """The number of burn-in steps, as learnt from earlier passes."""
        kept = self.memory.get(self._burn_key)
        return _FIRST_BURN if kept is None else int(kept)

    def learn(self, outcome: Outcome) -> None:
        """Keep a better number of burn-in steps for later passes."""
        assert self.plan is not None
        burn = _better_burn(self.plan, outcome.mismatches[0], self.length)
        # On the CPU regardless of torch.set_default_device, so that reading it causes no sync.
        self.memory[self._burn_key] = torch.tensor(burn, device="cpu")

    @property
    def _burn_key(self) -> str:
        return f"burn {self.key}"


@dataclass(frozen=True)
class SegmentPlan:
    """How to solve one pass: in ``count`` segments, from ``burn`` steps of burn-in, until ``stopping``."""

    count: int
    burn: int
    stopping: StoppingRule


@dataclass(frozen=True)
class SegmentRule:
    """Decides when and how to cut a chain into segments. The fields are the options of the engine ``shooting``."""

    segments: int | str
    tolerance: float | None
    burn: int | str
    corrector: str | None
    max_sweeps: int | None

    def should_cut(self, chain_pass: ChainPass) -> bool:
        """Return whether to cut this pass into segments; decides by sizes only, without a sync."""
        batch = len(chain_pass.like)
        if not batch:
            return False
        if isinstance(self.segments, int):
            return min(self.segments, chain_pass.length) > 1
        burn = self.burn if isinstance(self.burn, int) else _FIRST_BURN
        return segments_pay(chain_pass.length, batch, chain_pass.free, burn)

    def plan(self, chain_pass: ChainPass) -> SegmentPlan | None:
        """Return how to solve ``chain_pass`` in segments, or ``None`` to run it sequentially; changes nothing."""
        return None if chain_pass.is_paused or not self.should_cut(chain_pass) else self.cut(chain_pass)

    def cut(self, chain_pass: ChainPass) -> SegmentPlan:
        """Return how to solve in segments a pass that is not paused and :meth:`should_cut`."""
        batch, free = len(chain_pass.like), chain_pass.free
        burn = self.burn if isinstance(self.burn, int) else chain_pass.burn
        segments = self.segments
        wanted = segments if isinstance(segments, int) else best_count(chain_pass.length, batch, free, burn)
        count = min(wanted, chain_pass.length)
        if self.max_sweeps is None:
            most, worth = count - 1, break_even_sweeps(count, batch, free)
        else:
            most, worth = min(self.max_sweeps, count - 1), inf
        tolerance = tolerance_for(self.tolerance, chain_pass.like.dtype, chain_pass.rounding)
        stopping = StoppingRule(tolerance, most, worth)
        return SegmentPlan(count, min(burn, chain_pass.length // count), stopping)


def _better_burn(plan: SegmentPlan, mismatch: float, length: int) -> int:
    """Return the burn-in after which the start contributes a tenth of the tolerance, in multiples of 8 steps."""
    if not 0.0 < mismatch < 1.0:
        return plan.burn
    needed = plan.burn * log(plan.stopping.tolerance / 10) / log(mismatch)
    if mismatch <= plan.stopping.tolerance and needed > 0.7 * plan.burn:
        return plan.burn
    return max(8, min(8 * -(-int(needed) // 8), length // plan.count))
