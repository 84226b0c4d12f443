"""Multiple shooting: exact training of recurrent layers with no pass over all steps in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gradfree.chains.chain import ChainGradients
from gradfree.engines.options import check_count
from gradfree.engines.to_tolerance import ToleranceEngine
from gradfree.loops.recurrence import Runner
from gradfree.scans.rules import LoopRule
from gradfree.scans.segmented_loop import run_loop
from gradfree.segments.rule import ChainPass, SegmentRule
from gradfree.segments.segmented_passes import segmented_forward, segmented_gradients
from gradfree.time.forward import Forward, LayerCall


@dataclass(frozen=True, kw_only=True)
class Shooting(ToleranceEngine):
    """Recurrent layers in segments: all segments run at once, in both passes, until their borders agree.

    K is F inside a segment; across a border it is zero, or the product of the gates. This is multiple shooting (Bock &
    Plitt 1984) in both passes, and with the corrector a form of parareal (Lions, Maday & Turinici 2001).

    Outputs and gradients equal those of backpropagation to the tolerance. If the borders of a pass do not converge, the
    layer runs sequentially. A layer with long memory does so in the following passes as well; segments are tried again
    after a growing number of passes.

    Args:
        segments: C, their number. "auto": chosen from size, device and earlier passes; 1 if segments cannot be faster,
            then by torch's own kernel or as under ``backprop``, whichever is faster.
        tolerance: the largest mismatch at a border, relative to the largest state or cotangent, masks left out.
            ``None``: 1e-12 in float64, 1e-5 in float32, and for other dtypes the finest tolerance that they
            allow. Where products round their factors (TF32, autocast), at least 8 times that rounding error.
        burn: the number of burn-in steps: a border's first guess is computed over so many steps, from zero or, of
            ``scan``, from the initial carry. "auto": as many as the last passes needed.
        corrector: of torch's layers. "gate": a change at a border is passed on to the later borders, times the product
            of the gates over each segment. ``None``: no corrector.
        max_sweeps: the most sweeps, up to C - 1, which are exact. ``None``: as long as they are expected to be faster
            than the sequential call.
        evaluation: whether layers run by sweeps without gradients, too. ``False``: outputs of evaluation are bitwise
            torch's.
    """

    worth_trying: ClassVar = ({}, {"tolerance": 1e-3})
    namespace: ClassVar[str] = "segments"
    min_sweeps: ClassVar[int] = 0  # The first run of the segments is not a sweep.
    segments: int | str = "auto"
    burn: int | str = "auto"
    corrector: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in {"segments": 1, "burn": 0}.items():
            check_count(self, option, least, word="auto")
        if self.corrector not in (None, "gate"):
            raise ValueError(f"Shooting: corrector must be 'gate' or None, not {self.corrector!r}.")

    @property
    def forwards(self) -> Sequence[Forward]:
        """The forward pass in segments."""
        return (partial(segmented_forward, self.rule),)

    @property
    def loops(self) -> Runner:
        """Any step function in segments."""
        return partial(run_loop, LoopRule(cut=self.rule))

    def may_sweep(self, call: LayerCall) -> bool:
        """Return whether the sizes and the options allow more than one segment."""
        part = ChainPass("", "forward", {}, call.length, call.like, call.mode, fused=not call.is_packed)
        # The layout of packed sequences is chosen without segments, unless these are asked for.
        return self.rule.should_cut(part) and not (call.is_packed and self.segments == "auto")

    def gradients(self, chain: Any, direct: Any) -> ChainGradients:
        """Return the gradients, exact to the tolerance."""
        return segmented_gradients(chain, direct, self.rule)

    @property
    def needs_residual(self) -> bool:
        """Whether the gate corrects the segments' borders."""
        return self.corrector is not None

    @property
    def rule(self) -> SegmentRule:
        """When and how a chain is cut."""
        return SegmentRule(self.segments, self.tolerance, self.burn, self.corrector, self.max_sweeps)
