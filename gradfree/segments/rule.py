"""When and how a chain in time is solved in segments: the options, and what the passes before have shown."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradfree.segments.costs import ROWS_FOR_ONEDNN, best_count, pays, rows_for_free, worth
from gradfree.segments.settling import Outcome, Patience

_FIRST_BURN = 32
_FIRST_PAUSE = 50


def resolved(dtype: torch.dtype) -> float:
    """Return the smallest mismatch that sweeps in ``dtype`` can be asked for: eight times what it resolves."""
    return 8 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Part:
    """What a rule goes by: one pass through one chain.

    Attributes:
        path: what the chain is called.
        what: "forward" or "backward".
        name: of the chain in ``memory``.
        memory: what this rule keeps of it from pass to pass.
        length: T.
        like: a state, (B, H), of the states' dtype and device.
        known: whether the cell is one of torch's own.
        replays: whether it runs by oneDNN's LSTM, forward and backward.
    """

    path: str
    what: str
    name: str
    memory: dict[str, Tensor]
    length: int
    like: Tensor
    known: bool
    replays: bool = False

    @property
    def key(self) -> str:
        """What is kept of it is called so."""
        return f"{self.what} {self.name}"


@dataclass(frozen=True)
class SegmentPlan:
    """How one pass is solved: ``count`` segments, a first guess of borders from ``burn`` steps, and when to stop."""

    count: int
    burn: int
    patience: Patience


class FinishedPass(NamedTuple):
    """A pass that has run: by which plan, and how it went; neither if sequentially from the start.

    A forward pass may leave a graph for the backward pass, a ``Replay``.
    """

    part: Part
    plan: SegmentPlan | None = None
    outcome: Outcome | None = None
    replay: Any = None

    def figures(self) -> dict[str, float]:
        """Return what :func:`gradfree.engine_figures` tells of it."""
        if self.outcome is None:
            return {}
        prefix = "" if self.part.what == "backward" else "forward "
        found = {
            "sweeps": self.outcome.sweeps,
            "mismatch": self.outcome.mismatches[-1],
            "sequential": not self.outcome.settled,
        }
        return {prefix + name: float(figure) for name, figure in found.items()}


@dataclass(frozen=True)
class Rule:
    """When and how to cut a chain; the fields are the options of the engine ``shooting``."""

    segments: int | str
    tolerance: float | None
    burn: int | str
    corrector: str | None
    max_sweeps: int | None

    def within(self, dtype: torch.dtype) -> float:
        """Return the tolerance for states of ``dtype``."""
        usual = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.0)
        return max(usual if self.tolerance is None else self.tolerance, resolved(dtype))

    def cuts(self, length: int, batch: int, units: int, device: torch.device, known: bool) -> bool:
        """Tell whether such a chain is cut at all; looks at no tensor."""
        if not batch:
            return False
        if isinstance(self.segments, int):
            return min(self.segments, length) > 1
        burn = self.burn if isinstance(self.burn, int) else _FIRST_BURN
        return pays(length, batch, rows_for_free(device, units, known), burn)

    def plan(self, part: Part, count: int | None = None) -> SegmentPlan | None:
        """Return how to solve ``part``, or ``None``: sequentially; changes nothing.

        Args:
            part: the pass.
            count: of segments, if that is given already.
        """
        (batch, units), device = part.like.shape, part.like.device
        if not self.cuts(part.length, batch, units, device, part.known):
            return None
        kept = _Kept.of(part)
        if kept.wait:
            return None
        free = rows_for_free(device, units, part.known)
        burn = self.burn if isinstance(self.burn, int) else kept.burn
        if count is None:
            # What goes back through the kernel leaves no step over.
            rows, whole = (ROWS_FOR_ONEDNN, True) if part.replays else (free, False)
            best = best_count(part.length, batch, rows, burn, whole)
            count = self.segments if isinstance(self.segments, int) else best
        count = min(count, part.length)
        if self.max_sweeps is None:
            patience = Patience(self.within(part.like.dtype), count - 1, worth(count, batch, free))
        else:
            patience = Patience(self.within(part.like.dtype), min(self.max_sweeps, count - 1), inf)
        return SegmentPlan(count, min(burn, part.length // count), patience)

    def learn(self, taken: FinishedPass) -> None:
        """Keep what a pass has shown: a better burn, or that the chain does not forget; said the first time.

        Only backward passes call it, so that what a checkpoint runs forward again goes the way that it went first.
        """
        part, plan, outcome = taken[:3]
        kept = _Kept.of(part)
        if plan is None or outcome is None:
            if kept.wait:
                _Kept(kept.burn, kept.wait - 1, kept.pause).keep(part)
            return
        if outcome.settled:
            _Kept(_better_burn(plan, outcome.mismatches[0], part.length), 0, 0).keep(part)
            return
        if outcome.mismatches[-1] != outcome.mismatches[-1]:
            return  # A pass of NaN tells nothing of the next one.
        pause = 2 * kept.pause or _FIRST_PAUSE
        _Kept(kept.burn, pause, pause).keep(part)
        if not kept.pause:
            where = part.path or "the recurrent layer"
            warnings.warn(
                f"{where} does not forget: the {part.what} pass in {plan.count} segments was off by "
                f"{outcome.mismatches[-1]:.0e} at a border after {outcome.sweeps} sweeps, and runs sequentially now. "
                "It tries segments again now and then; the engine 'backprop' never does.",
                stacklevel=2,
            )


@dataclass(frozen=True)
class _Kept:
    """The burn, and the passes to run sequentially: how many are left, and of how many."""

    burn: int = _FIRST_BURN
    wait: int = 0
    pause: int = 0

    @staticmethod
    def of(part: Part) -> _Kept:
        return _Kept(*map(int, part.memory[part.key].tolist())) if part.key in part.memory else _Kept()

    def keep(self, part: Part) -> None:
        # On the CPU whatever torch.set_default_device says, where to look is no wait.
        part.memory[part.key] = torch.tensor([self.burn, self.wait, self.pause], device="cpu")


def _better_burn(plan: SegmentPlan, mismatch: float, length: int) -> int:
    """Return the steps after which a start is forgotten to a tenth of the tolerance, in multiples of 8."""
    if not 0.0 < mismatch < 1.0:
        return plan.burn
    needed = plan.burn * log(plan.patience.tolerance / 10) / log(mismatch)
    if mismatch <= plan.patience.tolerance and needed > 0.7 * plan.burn:
        return plan.burn
    return max(8, min(8 * -(-int(needed) // 8), length // plan.count))
