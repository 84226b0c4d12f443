"""An LSTM in segments by oneDNN. The forward pass keeps a graph, as oneDNN's backward is the fastest on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest
from gradfree.devices.costs import runs_onednn
from gradfree.segments.layout import join_segments, split_into_rows
from gradfree.segments.multiple_shooting import SweepResult
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import State
from gradfree.time.forward import Recurrence, Trajectory


def can_keep_graph(recurrence: Recurrence) -> bool:
    """Return whether oneDNN runs ``recurrence`` and its graph may be kept."""
    allowed = recurrence.cell is None and not recurrence.states_only and not torch.is_autocast_enabled("cpu")
    return allowed and runs_onednn(recurrence.x, recurrence.kind)


class LSTMGraph:
    """One run of all segments with its autograd graph.

    The first ``burn`` steps of all segments run in a separate call, so that the backward pass can run its burn-in
    through these steps only.

    Args:
        recurrence: in one direction.
        x: its input in segments, (S, C · B, I).
        entering: the segments' initial states, h and c, (C, B, H) each.
        count: C, the number of segments.
        burn: the number of burn-in steps of the backward pass.
    """

    def __init__(self, recurrence: Recurrence, x: Tensor, entering: Sequence[Tensor], count: int, burn: int):
        self.count = count
        self.first: list[Tensor] = [_leaf(part.flatten(0, 1)[None]) for part in entering]
        self.weights = [_leaf(w) for w in recurrence.weights]
        self.x = [_leaf(part) for part in x.split([burn, len(x) - burn]) if len(part)]
        self.outs: list[Tensor] = []
        finals = self.first
        biased = len(self.weights) > 2
        # Without a checkpoint's hooks: they count saved tensors, whose number depends on the number of sweeps.
        with torch.enable_grad(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            for part in self.x:
                out, *finals = torch.lstm(part, finals, self.weights, biased, 1, 0.0, False, False, False)
                self.outs.append(out)
        self.finals = finals

    def trajectory(self) -> Trajectory:
        """Return the outputs and final states without the graph."""
        outs = [out.detach() for out in self.outs]
        return Trajectory(torch.cat(outs), [final.detach() for final in self.finals])


class LSTMSegmentsBackward:
    """The backward pass in segments of a chain whose forward pass has kept an :class:`LSTMGraph`."""

    def __init__(self, graph: LSTMGraph, chain: CellChain, direct: State):
        self.graph, self.chain, self.count = graph, chain, graph.count
        self.e = split_into_rows(direct[0], self.count)
        self.outs = self.e.split([len(out) for out in graph.outs])
        batch, units = direct[0].shape[1:]
        # The direct cotangent of the final h is included in that of the last output.
        of_c = self.e.new_zeros(batch, units) if direct[1] is None else direct[1][-1]
        self.last = [self.e.new_zeros(batch, units), of_c]

    def guess(self) -> list[Tensor]:
        """Return the first guess of entering cotangents: a burn-in from zero through each segment's first steps."""
        graph = self.graph
        leaving = torch.autograd.grad(graph.outs[0], graph.first, self.outs[0], retain_graph=True)
        return [torch.cat([v[1:], own[None]]) for v, own in zip(self._parts(leaving), self.last, strict=True)]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run the VJPs of all segments from the entering cotangents."""
        graph = self.graph
        ends = [part.flatten(0, 1)[None] for part in entering]
        found = torch.autograd.grad(
            [*graph.outs, *graph.finals],
            [*graph.first, *graph.x, *graph.weights],
            [*self.outs, *ends],
            retain_graph=True,
        )
        leaving = self._parts(found[:2])
        sizes = [torch.maximum(largest(v), largest(self.e)) for v in leaving]
        return SweepResult(found, leaving, sizes)

    def gradients(self, found: Sequence[Tensor]) -> ChainGradients:
        """Return the chain's gradients from the last run's result."""
        parts, rest = len(self.graph.x), found[2:]
        of_x = join_segments(torch.cat([*rest[:parts]]), self.count, len(self.chain))
        wanted = [g if want else None for g, want in zip((of_x, *rest[parts:]), self.chain.wanted, strict=True)]
        return ChainGradients(tuple(v[0] for v in self._parts(found[:2])), wanted[:1], wanted[1:])

    def _parts(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [v[0].unflatten(0, (self.count, -1)) for v in rows]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()
