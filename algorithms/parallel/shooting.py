"""Multiple shooting: exact training of recurrent layers with no pass over all steps in sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gradfree.chains.chain import ChainGradients
from gradfree.convergence.passes import left_to_torch
from gradfree.engines.options import check_count
from gradfree.engines.to_tolerance import ToleranceEngine
from gradfree.segments.rule import ChainPass, SegmentRule
from gradfree.segments.segmented_backward import segmented_gradients
from gradfree.segments.segmented_forward import SegmentedForward
from gradfree.time.forward import Forward, LayerCall


@dataclass(frozen=True, kw_only=True)
class Shooting(ToleranceEngine):
    """Recurrent layers in segments: forward and backward, all segments at once, until their borders fit.

    K is F itself inside a segment and, across a border, zero or what the gates carry. Multiple shooting (Bock & Plitt
    1984), with the corrector a parareal (Lions, Maday & Turinici 2001), in both passes. Outputs and gradients are
    those of backpropagation to the tolerance: what does not settle in time runs sequentially, a layer that does not
    forget from then on; segments are tried again now and then.

    Args:
        segments: C, their number, or "auto": what size, device and the last passes suggest; 1 where segments cannot
            win, by torch's own kernel or, where that is faster, as under ``backprop``. Packed sequences run forward as
            one.
        tolerance: the largest mismatch at a border, relative to the largest state or cotangent. ``None``: 1e-12 in
            float64, 1e-5 in float32, eight times what any other dtype resolves.
        burn: steps that a border's first guess takes, from zero; "auto": what the last passes needed.
        corrector: "gate": a border's change goes on to the borders behind it times the gates' product over each
            segment; ``None``: it does not.
        max_sweeps: the most sweeps, up to C - 1, which are exact. ``None``: as long as they are expected to be quicker
            than the sequential call.
    """

    worth_trying: ClassVar = ({}, {"tolerance": 1e-3})
    segments: int | str = "auto"
    burn: int | str = "auto"
    corrector: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in {"segments": 1, "burn": 0}.items():
            if getattr(self, option) != "auto":
                check_count(self, option, least)
        if self.corrector not in (None, "gate"):
            raise ValueError(f"Shooting: corrector must be 'gate' or None, not {self.corrector!r}.")

    @property
    def min_sweeps(self) -> int:
        """None behind the first run."""
        return 0

    @property
    def forwards(self) -> Sequence[Forward]:
        """In segments."""
        return (SegmentedForward(self._rule),)

    def leave_to_torch(self, call: LayerCall) -> Callable[[], None] | None:
        """Leave to torch what is not cut, where its own kernel is faster than the closed form."""
        part = ChainPass("", "forward", "", {}, call.length, call.like, call.mode, fused=not call.packed)
        return left_to_torch(call, "segments", self._rule.should_cut(part))

    def gradients(self, chain: Any, direct: Any) -> ChainGradients:
        """Return the gradients to the tolerance."""
        return segmented_gradients(chain, direct, self._rule)

    @property
    def gate_remedy(self) -> str:
        """The corrector is its product."""
        return "that could correct its borders. Use corrector=None." if self.corrector else ""

    @property
    def _rule(self) -> SegmentRule:
        return SegmentRule(self.segments, self.tolerance, self.burn, self.corrector, self.max_sweeps)
