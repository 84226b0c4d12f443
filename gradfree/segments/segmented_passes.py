"""Both passes of a recurrence in segments that run at once, each by the fastest kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest_of_rows
from gradfree.convergence.passes import record_passes, remembers_evaluation
from gradfree.segments.gru import GRUSegments, GRUSegmentsBackward
from gradfree.segments.layout import by_segment, join_segments, segment_products, split_segments
from gradfree.segments.multiple_shooting import SweepResult, solve_borders
from gradfree.segments.rule import ChainPass, SegmentPlan, SegmentRule
from gradfree.time.closed_forms import State, linearise
from gradfree.time.forward import Recurrence, Trajectory, in_one_piece, run_sequentially
from gradfree.time.time_chain import TimeChain
from gradfree.time.torch_layer_chain import TorchLayerChain


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
    by_user = recurrence.mode is None
    found, outcome = solve_borders(segments.run, segments.guess(), plan.stopping, gate_products, masks=by_user)
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


def segmented_gradients(chain: TimeChain, direct: State, rule: SegmentRule) -> ChainGradients:
    """Return the gradients of ``chain`` to the rule's tolerance, or the exact ones if segments do not converge.

    Args:
        chain: any chain in time.
        direct: the direct cotangents of its states.
        rule: the engine's options.
    """
    gradients, backward = _solve(chain, direct, rule)
    record_passes(chain, chain.forward_pass, backward)
    return chain.backpropagate(direct) if gradients is None else gradients


def _solve(chain: TimeChain, direct: State, rule: SegmentRule) -> tuple[ChainGradients | None, ChainPass | None]:
    """Return the gradients, ``None`` if segments do not converge; and the pass, ``None`` if no segments can be cut."""
    if any(e is not None and (e.dim() != 3 or e.is_complex()) for e in direct):
        return None, None
    memory = chain.memory.of("segments")
    this = ChainPass(chain.path, "backward", memory, len(chain), chain.like[0], chain.kind)
    plan = rule.plan(this)
    if plan is None:
        return None, this
    segments: _BackwardSegments | GRUSegmentsBackward
    if isinstance(chain, TorchLayerChain) and chain.gates is not None:
        segments = GRUSegmentsBackward(chain, chain.gates, direct, plan)
    else:
        segments = _BackwardSegments(chain, direct, plan)
    gate_products = None if rule.corrector is None else segments.gate_products
    result, outcome = solve_borders(segments.run, segments.guess(), plan.stopping, gate_products, reverse=True)
    this.outcome, this.plan = outcome, plan
    return segments.gradients(result) if outcome.settled else None, this


class _BackwardSegments:
    """The backward pass in segments of any chain."""

    def __init__(self, chain: TimeChain, direct: State, plan: SegmentPlan):
        self.chain, self.length, self.count, self.burn = chain, len(chain), plan.count, plan.burn
        self.links = chain.rearranged(lambda x: split_segments(x, self.count))
        given = [torch.zeros_like(direct[0]) if e is None else e for e in direct]
        if missing := -self.length % self.count:
            # The padding of the last segment has no cotangents.
            given = [F.pad(e, (0, 0, 0, 0, 0, missing)) for e in given]
        self.terms = tuple(split_segments(e, self.count) for e in given)
        self.sizes = [largest_of_rows(by_segment(e, self.count)) for e in self.terms]

    def guess(self) -> list[Tensor]:
        """Return the first guess of entering cotangents: a burn-in from zero through each segment's first steps."""
        zeros = [torch.zeros_like(part) for part in self._parts([e[-1] for e in self.terms])]
        if not self.burn:
            return zeros
        leaving = self._leaving(self.links.unroll(tuple(e[: self.burn] for e in self.terms)))
        return [torch.cat([v[1:], zero[:1]]) for v, zero in zip(leaving, zeros, strict=True)]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run the VJPs of all segments from the entering cotangents."""
        delta = self.links.unroll(self.terms, [enters.flatten(0, 1) for enters in entering])
        own = [largest_of_rows(by_segment(d, self.count)) for d in delta]
        of = [torch.maximum(*both) for both in zip(own, self.sizes, strict=True)]
        return SweepResult(delta, self._leaving(delta), of)

    def gate_products(self) -> Sequence[Factor]:
        """Return the products of the gates' diagonals over each segment."""
        return [segment_products(d, self.count) for d in self.chain.diagonal]

    def gradients(self, delta: State) -> ChainGradients:
        """Return the chain's gradients from δ of all segments; the segments cannot run again."""
        # Frees memory that the following products need.
        del self.links, self.terms
        return self.chain.gradients(tuple(join_segments(d, self.count, self.length) for d in delta))

    def _leaving(self, delta: State) -> list[Tensor]:
        return self._parts(self.links.initial_cotangent(delta))

    def _parts(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [v.reshape(self.count, -1, v.shape[-1]) for v in rows]
