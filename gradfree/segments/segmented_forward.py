"""A recurrence run forward in segments, all at once, by whatever kernel runs it fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.convergence.outcome import largest
from gradfree.segments.gru import GRUSegments, keeps_gates
from gradfree.segments.layout import cut, joined
from gradfree.segments.replay import Replay, replays
from gradfree.segments.rule import FinishedPass, Part, Rule, SegmentPlan
from gradfree.segments.settling import Run, settle
from gradfree.time.closed_forms import linearise
from gradfree.time.forward import Forward, Recurrence, Trajectory, by_direction, run_plainly


class InSegments(Forward):
    """Any cell: each direction's sequence in segments, from borders that fit to the rule's tolerance.

    Args:
        rule: the engine's options.
    """

    def __init__(self, rule: Rule):
        self.rule = rule

    def allows(self, recurrence: Recurrence) -> bool:
        """Return whether the sequences are whole and long enough."""
        return recurrence.is_whole and self.rule.cuts(_part(recurrence))

    def run(self, recurrence: Recurrence) -> Trajectory:
        """Return outputs to the rule's tolerance, or where they do not settle in time the sequential ones."""
        return by_direction(recurrence, self._run)

    def _run(self, recurrence: Recurrence) -> Trajectory:
        """Run one direction."""
        graph = replays(recurrence) and self.rule.corrector is None
        part = replace(_part(recurrence), replays=graph)
        plan = self.rule.plan(part)
        if plan is None:
            return run_plainly(recurrence)._replace(passes=[FinishedPass(part)])
        behind = self.rule.plan(replace(part, what="backward", fused=False), plan.count)
        segments: _Segments | GRUSegments
        if keeps_gates(recurrence):
            segments = GRUSegments(recurrence, plan)
        else:
            segments = _Segments(recurrence, plan, graph, plan.burn if behind is None else behind.burn)
        reach = segments.reach if self.rule.corrector and recurrence.mode is not None else None
        found, outcome = settle(segments.run, segments.guess(), plan.stopping, reach)
        whole = segments.whole(found) if outcome.settled else run_plainly(recurrence)
        return whole._replace(passes=[FinishedPass(part, plan, outcome, segments.replay if outcome.settled else None)])


def _part(recurrence: Recurrence) -> Part:
    """Return the pass of the first direction."""
    (name, *_), (path, *_), fused = recurrence.names, recurrence.paths, recurrence.cell is None
    like, length = recurrence.first[0][0] if fused else recurrence.first[0], len(recurrence.x)
    return Part(path, "forward", name, recurrence.memory.of("segments"), length, like, recurrence.kind, fused)


class _Segments:
    """A recurrence in segments, and the steps that are left over; the backward pass starts by ``burn_behind`` steps."""

    def __init__(self, recurrence: Recurrence, plan: SegmentPlan, graph: bool, burn_behind: int):
        self.recurrence, self.plan, self.leaves_graph, self.burn_behind = recurrence, plan, graph, burn_behind
        self.count = plan.count
        self.steps = len(recurrence.x) // self.count
        self.x = cut(recurrence.x[: self.steps * self.count], self.count)
        self.left = self.steps * self.count < len(recurrence.x)
        self.first = [part.flatten(0, -2) for part in recurrence.first]
        self.replay: Replay | None = None

    def guess(self) -> list[Tensor]:
        """Return the states that the last steps of each segment lead to from zero."""
        zeros = [part.new_zeros(self.count, *part.shape) for part in self.first]
        burn = self.plan.burn
        leaving = self._parts(self._call(self.x[-burn:], zeros, lean=True).finals) if burn else zeros
        return [torch.cat([first[None], end[:-1]]) for first, end in zip(self.first, leaving, strict=True)]

    def run(self, entering: Sequence[Tensor]) -> Run:
        """Run all segments from what enters them."""
        self.entering = entering
        # What only some steps keep is of no use.
        if self.leaves_graph and not self.left:
            self.replay = Replay(self.recurrence, self.x, entering, self.count, self.burn_behind)
            self.found = found = self.replay.trajectory()
        else:
            self.found = found = self._call(self.x, entering, lean=self.left or self.recurrence.lean)
        leaving = self._parts(found.finals)
        return Run(found, leaving, [largest(found.out), *map(largest, leaving[1:])])

    def reach(self) -> Sequence[Factor]:
        """Return the products over each segment of what the gates carry."""
        assert self.recurrence.mode is not None
        entering = [start.flatten(0, 1) for start in self.entering]
        cell = linearise(self.recurrence.mode, self.x, self.found.out, entering, self.recurrence.weights, gates=None)
        return [d.prod(0).unflatten(0, (self.count, -1)) if isinstance(d, Tensor) else d for d in cell.diagonal]

    def whole(self, found: Trajectory) -> Trajectory:
        """Return what all steps have given, those that no segment has run last."""
        done = self.steps * self.count
        finals: Sequence[Tensor] = [part[-1] for part in self._parts(found.finals)]
        parts = [joined(part, self.count, done) for part in (found.out, *found.kept)]
        if self.left:
            finals = [final.view_as(part) for final, part in zip(finals, self.recurrence.first, strict=True)]
            rest = run_plainly(replace(self.recurrence, x=self.recurrence.x[done:], first=finals, lean=True))
            finals = rest.finals
            parts = [torch.cat(both) for both in zip(parts, (rest.out, *rest.kept), strict=True)]
        out, *others = parts
        first = self.recurrence.first
        return Trajectory(out, [final.view_as(p) for final, p in zip(finals, first, strict=True)], tuple(others))

    def _call(self, x: Tensor, entering: Sequence[Tensor], lean: bool) -> Trajectory:
        """Run segments from ``entering``, (C, B, ·) each, by the ways that run any recurrence."""
        single = self.recurrence.cell is not None
        first = [start.flatten(0, 1) if single else start.flatten(0, 1)[None] for start in entering]
        called = replace(self.recurrence, x=x, first=first, lean=lean)
        return run_plainly(called)

    def _parts(self, finals: Sequence[Tensor]) -> list[Tensor]:
        return [final.reshape(self.count, -1, final.shape[-1]) for final in finals]
