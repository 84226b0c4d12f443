"""The cotangents of a chain in time, solved in segments, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest
from gradfree.segments.gru_backward import GRUSegmentsBackward
from gradfree.segments.layout import join_segments, split_into_rows, split_segments
from gradfree.segments.lstm import LSTMSegmentsBackward
from gradfree.segments.multiple_shooting import SweepResult, solve_borders
from gradfree.segments.rule import ChainPass, FinishedPass, SegmentPlan, SegmentRule
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import State
from gradfree.time.time_chain import TimeChain


def segmented_gradients(chain: TimeChain, direct: State, rule: SegmentRule) -> ChainGradients:
    """Return the gradients of ``chain`` to the rule's tolerance, or where they do not settle in time the exact ones.

    Args:
        chain: any chain in time.
        direct: the direct cotangents of its states.
        rule: the engine's options.
    """
    found, backward = _settled(chain, direct, rule)
    for finished in (chain.forward_pass, backward):
        if isinstance(finished, FinishedPass):
            rule.learn(finished)
            if finished.outcome is not None:
                finished.part.report(chain, finished.outcome)
    return chain.backpropagate(direct) if found is None else found


def _settled(chain: TimeChain, direct: State, rule: SegmentRule) -> tuple[ChainGradients | None, FinishedPass | None]:
    """Return the gradients, or ``None`` if δ does not settle, and how it went, if states are vectors."""
    if any(e is not None and e.dim() != 3 for e in direct):
        return None, None
    part = ChainPass(
        chain.path,
        "backward",
        chain.name,
        chain.memory.of("segments"),
        len(chain),
        chain.like[0],
        chain.kind,
    )
    graph = chain.forward_pass.graph if isinstance(chain.forward_pass, FinishedPass) else None
    plan = rule.plan(part, graph.count if graph else None)
    if plan is None:
        return None, FinishedPass(part)
    segments: _BackwardSegments | LSTMSegmentsBackward | GRUSegmentsBackward
    if graph is not None:
        assert isinstance(chain, CellChain)
        segments = LSTMSegmentsBackward(graph, chain, direct)
    elif isinstance(chain, CellChain) and chain.gates is not None:
        segments = GRUSegmentsBackward(chain, chain.gates, direct, plan)
    else:
        segments = _BackwardSegments(chain, direct, plan)
    gate_products = (
        None if rule.corrector is None or isinstance(segments, LSTMSegmentsBackward) else segments.gate_products
    )
    result, outcome = solve_borders(segments.run, segments.guess(), plan.stopping, gate_products, reverse=True)
    return segments.gradients(result) if outcome.settled else None, FinishedPass(part, plan, outcome)


class _BackwardSegments:
    """The links of a chain in segments, and the direct cotangents."""

    def __init__(self, chain: TimeChain, direct: State, plan: SegmentPlan):
        self.chain, self.length, self.count, self.burn = chain, len(chain), plan.count, plan.burn
        # Closed forms need no copy; other cells take their rows in one dimension.
        regroup = split_segments if isinstance(chain, CellChain) else split_into_rows
        self.links = chain.rearranged(lambda x: regroup(x, self.count))
        given = [torch.zeros_like(direct[0]) if e is None else e for e in direct]
        if missing := -self.length % self.count:
            # No cotangent reaches the steps that fill up the last segment.
            given = [F.pad(e, (0, 0, 0, 0, 0, missing)) for e in given]
        self.terms = tuple(regroup(e, self.count) for e in given)
        self.rows = self.terms[0].shape[1:-1]
        self.sizes = [largest(e) for e in given]

    def guess(self) -> list[Tensor]:
        """Return the cotangents that the first steps of each segment lead to from zero."""
        zeros = [torch.zeros_like(part) for part in self._parts([e[-1] for e in self.terms])]
        if not self.burn:
            return zeros
        leaving = self._leaving(self.links.unroll(tuple(e[: self.burn] for e in self.terms)))
        return [torch.cat([v[1:], zero[:1]]) for v, zero in zip(leaving, zeros, strict=True)]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run all segments from what enters them."""
        delta = self.links.unroll(self.terms, [enters.view(*self.rows, -1) for enters in entering])
        of = [torch.maximum(largest(d), size) for d, size in zip(delta, self.sizes, strict=True)]
        return SweepResult(delta, self._leaving(delta), of)

    def gate_products(self) -> Sequence[Factor]:
        """Return the products over each segment of what the gates carry."""
        return [
            d.reshape(self.count, -1, d.shape[-1]) if isinstance(d, Tensor) else d for d in self.links.gate_products()
        ]

    def gradients(self, delta: State) -> ChainGradients:
        """Return the chain's for δ of all segments; there are no runs behind it."""
        # The products that follow take as much memory.
        del self.links, self.terms
        return self.chain.gradients(tuple(join_segments(d, self.count, self.length) for d in delta))

    def _leaving(self, delta: State) -> list[Tensor]:
        return self._parts(self.links.initial_cotangent(delta))

    def _parts(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [v.reshape(self.count, -1, v.shape[-1]) for v in rows]
