"""Newton's method on a loop: all steps are segments of one step, whose borders are corrected by their Jacobians.

This is DEER (Lim et al., ICLR 2024, arXiv 2309.12252). The Jacobians are exact, by VJPs, so that the sweeps converge
quadratically, and one scan solves the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.affine_scan import affine_scan
from gradfree.convergence.outcome import (
    Outcome,
    StoppingRule,
    coarsest_dtype,
    finest_tolerance,
    largest,
    largest_of_rows,
    relative,
    relative_to_states,
    so_far,
)
from gradfree.loops.recurrence import Loop
from gradfree.newton.iteration import remaining_change
from gradfree.scans.first_step import FirstStep
from gradfree.scans.layout import Cut
from gradfree.scans.narrow import Rows
from gradfree.scans.segments import LoopSegments, LoopSegmentsBackward, Ran, numbers, values
from gradfree.segments.multiple_shooting import SweepResult

_FAR = 1e3
"""A change that is larger than the states by this factor comes from growing products of Jacobians."""
_BACKWARD_SWEEPS = 3
"""The most sweeps of the backward pass, which is linear: more than one only correct rounding."""


class NewtonSteps(LoopSegments):
    """A loop, all of whose steps run at once.

    Args:
        loop: the loop; its carry consists of floating or complex tensors.
        first: its first step.
    """

    def __init__(self, loop: Loop, first: FirstStep):
        super().__init__(loop, first, Cut.into(loop.length, loop.length), 0, None)
        self.rows: Rows | None = None
        self.jacobians = torch.empty(0)
        self._trains = False

    def solve(self, stopping: StoppingRule) -> tuple[Ran, Outcome]:
        """Run all steps from a guess until Newton's method has converged."""
        self._trains, needed = torch.is_grad_enabled(), self.needed
        self.needed = [True] * len(needed)
        with torch.inference_mode(False), torch.enable_grad():
            self.x = [t.clone() if t.is_inference() else t for t in self.x]
            init = [t.clone() if t.is_inference() else t for t in self.init]
            starts = [numbers(t.expand(self.cut.count, *t.shape)) for t in init]
            inputs = [t for t in (*self.x, *init) if t.is_floating_point()]
            ran, entering, outcome = solve_steps(self._run_with_jacobians, starts, self._correct, stopping, inputs)
            if outcome.settled and self._trains and not all(needed):
                # As in the loop, parts of the carry that no gradient reaches have no graph.
                self.needed = needed
                ran = self.run(entering).result
        return ran, outcome

    def _run_with_jacobians(self, starts: Sequence[Tensor]) -> SweepResult:
        found = self.run(starts)
        if self.rows is None:
            self.rows, self.jacobians = self._independent_rows(found.result)
        else:
            self.jacobians = self._jacobians_of(found.result, self.rows)
        return found

    def _independent_rows(self, ran: Ran) -> tuple[Rows, Tensor]:
        """Return the narrowest rows that do not depend on each other, and the Jacobians of all steps.

        A VJP in a random direction tells.
        """
        live = [n for n, t in enumerate(ran.leaving) if t.requires_grad]
        parts = [numbers(t) for t in self.init]
        everything = Rows(tuple(t.shape for t in parts), 1)
        size = self.cut.count * everything.width
        # Numbers of no pattern, without a draw from torch's generator.
        direction = torch.arange(size, dtype=parts[0].dtype, device=parts[0].device).mul(2.399963).cos()
        given = everything.split(direction.view(self.cut.count, 1, -1))
        given = [v.to(t.dtype) for v, t in zip(given, parts, strict=True)]
        expected = self._vjp(ran, live, [given[n] for n in live])
        for rows in Rows.candidates(self.init):
            jacobians = self._jacobians_of(ran, rows)
            if rows.count == 1:
                return rows, jacobians
            found = rows.join(given).unsqueeze(-2) @ jacobians
            error = largest(found.squeeze(-2) - rows.join(expected))
            if error <= 1e3 * torch.finfo(coarsest_dtype(parts)).eps * largest(found):
                return rows, jacobians
        raise DependentRowsError

    def _jacobians_of(self, ran: Ran, rows: Rows) -> Tensor:
        """Return the Jacobians of all steps, (T, R, n, n), one VJP for each number of a row."""
        found = []
        for n, (t, width) in enumerate(zip(ran.leaving, rows.widths, strict=True)):
            like = numbers(t)
            for place in range(width):
                unit = like.new_zeros(like.shape).view(len(like), rows.count, -1)
                unit[..., place] = 1
                live = [n] if t.requires_grad else []
                found.append(rows.join(self._vjp(ran, live, [unit.view_as(like)] * len(live))))
        return torch.stack(found, -2)

    def _vjp(self, ran: Ran, live: Sequence[int], given: Sequence[Tensor]) -> list[Tensor]:
        """Return the cotangents of the starts, as real numbers of one dtype, for those of the ``live`` parts."""
        found: Sequence[Tensor | None] = [None] * len(ran.starts)
        if live:
            roots = [ran.leaving[n] for n in live]
            cotangents = [values(v.contiguous(), t.dtype) for v, t in zip(given, roots, strict=True)]
            found = torch.autograd.grad(roots, ran.starts, cotangents, retain_graph=True, allow_unused=True)
        return [numbers(torch.zeros_like(t) if v is None else v) for v, t in zip(found, ran.starts, strict=True)]

    def _correct(self, jumps: Sequence[Tensor], starts: Sequence[Tensor]) -> tuple[list[Tensor], float]:
        """Return the change of all starts but the first, and its size; at least :data:`_FAR` if it is unreliable."""
        assert self.rows is not None
        terms, links = self.rows.join(jumps), self.jacobians[:-1]
        change = self.rows.split(affine_scan(terms, links))
        before = [start[1:] for start in starts]
        if (size := relative_so_far(change, before)) <= _FAR:
            return change, size
        # Limited to rows of sum 1, the links cannot make the change grow.
        links = links / links.abs().sum(-1, keepdim=True).clamp(min=1)
        change = self.rows.split(affine_scan(terms, links))
        return change, max(relative_so_far(change, before), _FAR)

    def outputs(self, ran: Ran) -> list[Tensor]:
        """Return the outputs, without a graph in evaluation."""
        found = super().outputs(ran)
        return found if self._trains else [t.detach() for t in found]

    def backward(self, ran: Ran, cotangents: Sequence[Tensor | None]) -> LoopSegmentsBackward:
        """Return the backward pass."""
        return NewtonStepsBackward(self, ran, cotangents)


class NewtonStepsBackward(LoopSegmentsBackward):
    """The backward pass through all steps at once."""

    segments: NewtonSteps

    def _solve(self, stopping: StoppingRule) -> tuple[Any, Outcome]:
        """Solve for all cotangents by one scan, and check them by one VJP through all steps."""
        entering = self._entering([None] * len(self.live))
        leaving = self._to_starts(*self._roots(entering))
        entering = [numbers(v) for v in entering]
        ends = [torch.zeros_like(v) if e is None else numbers(e) for e, v in zip(leaving, entering, strict=True)]
        change = self._change([e[1:] - v[:-1] for e, v in zip(ends, entering, strict=True)])
        for v, step in zip(entering, change, strict=True):
            v[:-1] += step
        stopping = StoppingRule(stopping.tolerance, _BACKWARD_SWEEPS)
        result, _, outcome = solve_steps(self.run, entering, self._correct, stopping, reverse=True)
        return result, outcome

    def _change(self, jumps: Sequence[Tensor]) -> list[Tensor]:
        """Return the change of all cotangents but the last step's."""
        assert self.segments.rows is not None
        rows, places = self.segments.rows.of(self.live), self.segments.rows.places(self.live)
        links = self.segments.jacobians[:-1]
        links = links if len(places) == links.shape[-1] else links[..., places, :][..., places]
        return rows.split(affine_scan(rows.join(jumps), links, reverse=True))

    def _correct(self, jumps: Sequence[Tensor], entering: Sequence[Tensor]) -> tuple[list[Tensor], float]:
        """Return the change, and its size."""
        change = self._change(jumps)
        return change, relative_so_far(change, [v[:-1] for v in entering], reverse=True)


class DependentRowsError(Exception):
    """Raised for a carry whose rows depend on each other."""


def solve_steps(
    run: Callable[[Sequence[Tensor]], SweepResult],
    entering: Sequence[Tensor],
    correct: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], float]],
    stopping: StoppingRule,
    inputs: Sequence[Tensor] = (),
    reverse: bool = False,
) -> tuple[Any, Sequence[Tensor], Outcome]:
    """Run all steps until the change of their starts by Newton's method is below the tolerance.

    Such a change estimates the error of the starts. A jump between one step's end and the next one's start does not: it
    is carried on by all later steps. Where jumps are as small as rounding, no sweep can improve on them.

    Args:
        run: runs all steps from their starts.
        entering: the first guess of all starts, part by part, (T, ...); that of the first step must be exact.
        correct: returns the change of the starts for jumps and starts, and its size by :func:`relative_so_far`.
        stopping: when to stop.
        inputs: tensors that are finite if the user's input is.
        reverse: whether steps run from the last to the first.

    Returns:
        The last run's result, the starts of it, and the outcome.
    """
    outcome, changes = Outcome(stopping.tolerance), list[float]()
    here, there = (slice(None, -1), slice(1, None)) if reverse else (slice(1, None), slice(None, -1))
    finest = finest_tolerance(entering[0].dtype)
    while True:
        result, leaving, _ = run(entering)
        ends, starts = [end[there] for end in leaving], [start[here] for start in entering]
        jumps = [end - start for end, start in zip(ends, starts, strict=True)]
        change, size = correct(jumps, entering)
        stalls = bool(changes) and size > changes[-1] / 2
        changes.append(size)
        outcome.mismatches.append(size * remaining_change(changes))
        if not isfinite(size):
            outcome.mismatches[-1] = inf if all(isfinite(largest(t).item()) for t in inputs) else nan
        exact = outcome.sweeps == len(entering[0]) - 1 and isfinite(size)
        fine = stalls and relative_so_far(jumps, ends, reverse) <= finest
        outcome.settled = exact or fine or outcome.mismatches[-1] <= stopping.tolerance
        if outcome.settled or stopping.should_stop(outcome):
            return result, entering, outcome
        entering = [start.clone() for start in entering]
        for start, step in zip(entering, change, strict=True):
            start[here] += step
        outcome.sweeps += 1


def relative_so_far(change: Sequence[Tensor], before: Sequence[Tensor], reverse: bool = False) -> float:
    """Return the largest change of a step, relative to the largest number of that part in it and all earlier steps.

    Growing sequences must be right at their small beginnings, too. Waits for the device.

    Args:
        change: part by part, (T, ...).
        before: what changes.
        reverse: whether the last step is the earliest.
    """
    after = [start + step for step, start in zip(change, before, strict=True)]
    sizes = [
        so_far(largest_of_rows(torch.maximum(old.abs(), new.abs())), reverse)
        for old, new in zip(before, after, strict=True)
    ]
    return relative(change, sizes) if reverse else relative_to_states(change, after, sizes)
