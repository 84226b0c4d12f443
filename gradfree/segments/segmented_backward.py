"""The backward pass of a chain in time in segments that run at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest_of_rows
from gradfree.convergence.passes import record_passes
from gradfree.segments.gru import GRUSegmentsBackward
from gradfree.segments.layout import by_segment, join_segments, segment_products, split_segments
from gradfree.segments.multiple_shooting import SweepResult, solve_borders
from gradfree.segments.rule import ChainPass, SegmentPlan, SegmentRule
from gradfree.time.closed_forms import State
from gradfree.time.time_chain import TimeChain
from gradfree.time.torch_layer_chain import TorchLayerChain


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
