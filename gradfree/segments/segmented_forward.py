"""The forward pass of a recurrence in segments that run at once, each by the fastest kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.convergence.outcome import largest_of_rows
from gradfree.convergence.passes import remembers_evaluation
from gradfree.segments.gru import GRUSegments
from gradfree.segments.layout import by_segment, join_segments, split_segments
from gradfree.segments.multiple_shooting import SweepResult, solve_borders
from gradfree.segments.rule import ChainPass, SegmentPlan, SegmentRule
from gradfree.time.closed_forms import linearise
from gradfree.time.forward import Recurrence, Trajectory, in_one_piece, run_sequentially


@remembers_evaluation
def segmented_forward(rule: SegmentRule, recurrence: Recurrence) -> Trajectory | None:
    """Run any cell in segments until borders agree to the rule's tolerance, or else step by step.

    Args:
        rule: the engine's options.
        recurrence: in one direction.

    Returns:
        The trajectory; ``None`` if sequences have several lengths or are too short for segments.
    """
    if not recurrence.is_dense:
        return None
    this = _chain_pass(recurrence)
    if not rule.should_cut(this):
        return None
    if this.is_paused:
        return run_sequentially(recurrence)._replace(passes=[this])
    plan = rule.cut(this)
    if recurrence.mode is not None:
        # Once for all calls of the kernel.
        recurrence = replace(recurrence, weights=in_one_piece(recurrence.weights, 1))
    segments = (GRUSegments if recurrence.may_keep_gates else _ForwardSegments)(recurrence, plan)
    gate_products = segments.gate_products if rule.corrector and recurrence.mode is not None else None
    found, outcome = solve_borders(segments.run, segments.guess(), plan.stopping, gate_products)
    this.outcome, this.plan = outcome, plan
    whole = segments.trajectory(found) if outcome.settled else run_sequentially(recurrence)
    return whole._replace(passes=[this])


def _chain_pass(recurrence: Recurrence) -> ChainPass:
    """Return the sizes of the pass."""
    (path,), like, length, fused = recurrence.paths, recurrence.first[0][0], len(recurrence.x), recurrence.cell is None
    return ChainPass(path, "forward", recurrence.memory.of("segments"), length, like, recurrence.kind, fused)


class _ForwardSegments:
    """A recurrence in segments, and the remaining steps."""

    def __init__(self, recurrence: Recurrence, plan: SegmentPlan):
        self.recurrence, self.plan = recurrence, plan
        self.count = plan.count
        self.steps = len(recurrence.x) // self.count
        self.x = split_segments(recurrence.x[: self.steps * self.count], self.count)
        self.has_remainder = self.steps * self.count < len(recurrence.x)

    def guess(self) -> list[Tensor]:
        """Return the first guess of entering states: a burn-in from zero through each segment's last steps."""
        zeros = [part.new_zeros(self.count, *part.shape[1:]) for part in self.recurrence.first]
        burn = self.plan.burn
        leaving = self._parts(self._call(self.x[-burn:], zeros, states_only=True).finals) if burn else zeros
        return [torch.cat([first, end[:-1]]) for first, end in zip(self.recurrence.first, leaving, strict=True)]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run all segments from the entering states."""
        self.entering = entering
        # With remaining steps, nothing is kept for the backward pass: it would lack those steps.
        self.found = found = self._call(self.x, entering, states_only=self.has_remainder or self.recurrence.states_only)
        leaving = self._parts(found.finals)
        sizes = [by_segment(found.out, self.count), *leaving[1:]]
        return SweepResult(found, leaving, list(map(largest_of_rows, sizes)))

    def gate_products(self) -> Sequence[Factor]:
        """Return the products of the gates' diagonals over each segment."""
        assert self.recurrence.mode is not None
        entering = [start.flatten(0, 1) for start in self.entering]
        cell = linearise(self.recurrence.mode, self.x, self.found.out, entering, self.recurrence.weights, gates=None)
        return [d.prod(0).unflatten(0, (self.count, -1)) if isinstance(d, Tensor) else d for d in cell.diagonal]

    def trajectory(self, found: Trajectory) -> Trajectory:
        """Run the remaining steps after the segments; return the trajectory of all steps."""
        covered = self.steps * self.count
        finals: Sequence[Tensor] = [part[-1:] for part in self._parts(found.finals)]
        parts = [join_segments(part, self.count, covered) for part in (found.out, *found.kept)]
        if self.has_remainder:
            left = replace(self.recurrence, x=self.recurrence.x[covered:], first=finals, states_only=True)
            rest = run_sequentially(left)
            finals = rest.finals
            parts = [torch.cat(both) for both in zip(parts, (rest.out, *rest.kept), strict=True)]
        out, *others = parts
        return Trajectory(out, finals, tuple(others))

    def _call(self, x: Tensor, entering: Sequence[Tensor], states_only: bool) -> Trajectory:
        """Run all segments from ``entering``, (C, B, ·) each, as one batch of sequences."""
        first = [start.flatten(0, 1)[None] for start in entering]
        return run_sequentially(replace(self.recurrence, x=x, first=first, states_only=states_only))

    def _parts(self, finals: Sequence[Tensor]) -> list[Tensor]:
        return [final.reshape(self.count, -1, final.shape[-1]) for final in finals]
