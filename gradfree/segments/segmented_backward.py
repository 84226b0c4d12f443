"""The cotangents of a chain in time, solved in segments, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest
from gradfree.segments.gru_backward import GRUPieces
from gradfree.segments.layout import cut, joined, pieces
from gradfree.segments.replay import ReplayPieces
from gradfree.segments.rule import FinishedPass, Part, Rule, SegmentPlan
from gradfree.segments.settling import Run, settle
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import State
from gradfree.time.time_chain import TimeChain


def in_segments(chain: TimeChain, direct: State, rule: Rule) -> ChainGradients:
    """Return the gradients of ``chain`` to the rule's tolerance, or where they do not settle in time the exact ones.

    Args:
        chain: any chain in time.
        direct: the direct cotangents of its states.
        rule: the engine's options.
    """
    found, backward = _settled(chain, direct, rule)
    for taken in (chain.forward_pass, backward):
        if isinstance(taken, FinishedPass):
            rule.learn(taken)
            if taken.outcome is not None:
                taken.part.report(chain, taken.outcome)
    return chain.backpropagate(direct) if found is None else found


def _settled(chain: TimeChain, direct: State, rule: Rule) -> tuple[ChainGradients | None, FinishedPass | None]:
    """Return the gradients, or ``None`` if δ does not settle, and how it went, if states are vectors."""
    if any(e is not None and e.dim() != 3 for e in direct):
        return None, None
    part = Part(
        chain.path,
        "backward",
        chain.name,
        chain.memory.of("segments"),
        len(chain),
        chain.like[0],
        chain.kind,
    )
    replay = chain.forward_pass.replay if isinstance(chain.forward_pass, FinishedPass) else None
    plan = rule.plan(part, replay.count if replay else None)
    if plan is None:
        return None, FinishedPass(part)
    segments: _Segments | ReplayPieces | GRUPieces
    if replay is not None:
        assert isinstance(chain, CellChain)
        segments = ReplayPieces(replay, chain, direct)
    elif isinstance(chain, CellChain) and chain.gates is not None:
        segments = GRUPieces(chain, chain.gates, direct, plan)
    else:
        segments = _Segments(chain, direct, plan)
    reach = None if rule.corrector is None or isinstance(segments, ReplayPieces) else segments.reach
    result, outcome = settle(segments.run, segments.guess(), plan.stopping, reach, reverse=True)
    return segments.gradients(result) if outcome.settled else None, FinishedPass(part, plan, outcome)


class _Segments:
    """The links of a chain in segments, and the direct cotangents."""

    def __init__(self, chain: TimeChain, direct: State, plan: SegmentPlan):
        self.chain, self.length, self.count, self.burn = chain, len(chain), plan.count, plan.burn
        # Closed forms need no copy; other cells take their rows in one dimension.
        regroup = pieces if isinstance(chain, CellChain) else cut
        self.links = chain.regrouped(lambda x: regroup(x, self.count))
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

    def run(self, entering: Sequence[Tensor]) -> Run:
        """Run all segments from what enters them."""
        delta = self.links.unroll(self.terms, [enters.view(*self.rows, -1) for enters in entering])
        of = [torch.maximum(largest(d), size) for d, size in zip(delta, self.sizes, strict=True)]
        return Run(delta, self._leaving(delta), of)

    def reach(self) -> Sequence[Factor]:
        """Return the products over each segment of what the gates carry."""
        return [d.reshape(self.count, -1, d.shape[-1]) if isinstance(d, Tensor) else d for d in self.links.reach()]

    def gradients(self, delta: State) -> ChainGradients:
        """Return the chain's for δ of all segments; there are no runs behind it."""
        # The products that follow take as much memory.
        del self.links, self.terms
        return self.chain.gradients(tuple(joined(d, self.count, self.length) for d in delta))

    def _leaving(self, delta: State) -> list[Tensor]:
        return self._parts(self.links.leaving(delta))

    def _parts(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [v.reshape(self.count, -1, v.shape[-1]) for v in rows]
