"""How a loop may run besides step by step: in segments, or by Newton's method over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradfree.convergence.outcome import coarsest_dtype, tolerance_for
from gradfree.devices.costs import affordable_sweeps
from gradfree.devices.hardware import product_rounding
from gradfree.newton.iteration import NewtonOptions, NewtonRule
from gradfree.scans.narrow import Rows
from gradfree.segments.rule import SegmentRule

_FEWEST = 2
"""The fewest sweeps that Newton's method is tried for."""


@dataclass(frozen=True)
class LoopRule:
    """How an engine allows a loop to run, besides step by step.

    Attributes:
        cut: when and how to cut it into segments; ``None``: never.
        newton: the options of Newton's method; ``None``: it is not used.
    """

    cut: SegmentRule | None = None
    newton: NewtonOptions | None = None

    @property
    def always_newton(self) -> bool:
        """Whether Newton's method is used without comparing times."""
        return self.newton is not None and self.newton.max_sweeps is not None and self.cut is None

    def newton_stopping(self, carry: Sequence[Tensor], length: int) -> NewtonRule | None:
        """Return when Newton's method stops, or ``None`` if it is not used; decides by sizes only, without a sync.

        Args:
            carry: the initial carry.
            length: T.
        """
        if self.newton is None or length < 2 or not is_narrow(carry):
            return None
        most = self.newton.max_sweeps
        patience = _affordable(length, carry) if most is None else most
        if patience < _FEWEST and most is None:
            return None
        dtype = coarsest_dtype(carry)
        tolerance = tolerance_for(self.newton.tolerance, dtype, product_rounding(carry[0].device, dtype))
        return NewtonRule(tolerance, min(5 * patience if most is None else most, length), patience=patience)


def is_narrow(carry: Sequence[Tensor]) -> bool:
    """Return whether Newton's method can be used for steps with this carry: real or complex numbers, few a row."""
    numbers = all(t.is_floating_point() or t.is_complex() for t in carry) and any(t.numel() for t in carry)
    return numbers and any(Rows.candidates(carry))


def _affordable(length: int, carry: Sequence[Tensor]) -> int:
    """Return how many sweeps take a tenth of the loop's time."""
    # As far as shapes tell: the rows may be narrower.
    rows = max(Rows.candidates(carry), key=lambda rows: (rows.count > 1, rows.width))
    return affordable_sweeps(carry[0].device, length, rows.count, rows.width)
