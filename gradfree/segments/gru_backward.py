"""A GRU's way back in segments: what a step needs is made of its gates when its turn comes, and lies nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest
from gradfree.segments.multiple_shooting import SweepResult
from gradfree.segments.rule import SegmentPlan
from gradfree.segments.segment_rows import SegmentRows
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import State, through_sigmoid, through_tanh
from gradfree.time.gru_forward import Gates, is_batch_major

_NEAR = 2**17
"""Numbers that lie near a core: those of as many steps are made at once."""


class GRUSegmentsBackward:
    """A GRU whose gates were kept, and the direct cotangents.

    Steps that are left over are gone through first, one behind the other.

    Args:
        chain: of the GRU.
        gates: its gates.
        direct: the direct cotangents.
        plan: of how many segments, and of how many steps of them the guess is.
    """

    def __init__(self, chain: CellChain, gates: Gates, direct: State, plan: SegmentPlan):
        self.chain, self.gates, self.burn = chain, gates, plan.burn
        self.rows = SegmentRows(plan.count, is_batch_major(gates.hidden))
        self.e = self.rows.in_layout(direct[0])
        self.covered = len(chain) // plan.count * plan.count
        self.width = chain.out.shape[-1]
        # The cotangents of Q_n, P_r, P_z and P_n side by side have in them those of Q and those of P.
        self.found = self.rows.empty(chain.out, 4 * self.width)
        self.weight = chain.parameters[1].roll(self.width, 0)
        self.size = largest(self.e)
        ends = chain.out[: self.covered].unflatten(0, (plan.count, -1))[:-1, -1]
        self.starts = self.rows.from_states(torch.cat([chain.first[0][None], ends]))
        self.last = torch.zeros_like(chain.first[0])
        if self.covered < len(chain):
            self.last = self._steps(lambda x: x[self.covered :], chain.out[self.covered - 1], self.last)

    def guess(self) -> list[Tensor]:
        """Return the cotangents that the first steps of each segment lead to from zero."""
        entering = self.last.new_zeros(self.rows.count, *self.last.shape)
        if self.burn:
            entering[:-1] = self._through(self.burn, entering)[1:]
        entering[-1] = self.last
        return [entering]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Go back through all segments from what enters them."""
        leaving = self._through(self.covered, entering[0])
        return SweepResult(leaving[0], [leaving], [torch.maximum(largest(leaving), self.size)])

    def gate_products(self) -> Sequence[Factor]:
        """Return the products over each segment of the update gates."""
        z = self.gates.reset_update[: self.covered, :, self.width :]
        return [z.unflatten(0, (self.rows.count, -1)).prod(1)]

    def gradients(self, initial: Tensor) -> ChainGradients:
        """Return the chain's, given that of the initial state."""
        chain, width = self.chain, self.width
        of_x, of_w_ih, of_w_hh, *of_biases = chain.wanted
        w_hh = self._of_weight().roll(-width, 0) if of_w_hh else None
        found = self.rows.to_matrix(self.found)
        fed, sums = found[:, width:], found.sum(0) if any(of_biases) else None
        inputs = self.rows.from_matrix(fed @ chain.parameters[0], len(chain)) if of_x else None
        parameters = [fed.t() @ self.rows.to_matrix(chain.x) if of_w_ih else None, w_hh]
        if sums is not None:
            both = sums[width:], sums[: 3 * width].roll(-width)
            parameters += [own if want else None for own, want in zip(both, of_biases, strict=True)]
        return ChainGradients((initial,), [inputs], [*parameters, None, None][: len(chain.parameters)])

    def _of_weight(self) -> Tensor:
        """Return the gradient of W_hh, its rows as those of ``weight``."""
        of_q, out = self.found[..., : 3 * self.width], self.chain.out
        total = of_q[0].t() @ self.chain.first[0]
        if not self.rows.batch_major:
            return total.addmm_(of_q[1:].flatten(0, 1).t(), out[:-1].flatten(0, 1))
        for cotangents, states in zip(of_q[1:].unbind(1), out[:-1].unbind(1), strict=True):
            total.addmm_(cotangents.t(), states)
        return total

    def _through(self, steps: int, entering: Tensor) -> Tensor:
        """Go back through the first ``steps`` of each segment; return what leaves them, both (C, B, H)."""
        rows = self.rows.from_states(entering)
        return self.rows.to_states(
            self._steps(lambda x: self.rows.by_step(x[: self.covered])[:steps], self.starts, rows)
        )

    def _steps(self, chosen: Callable[[Tensor], Tensor], start: Tensor, entering: Tensor) -> Tensor:
        """Go back through some steps of some segments.

        Args:
            chosen: returns of a tensor (T, B, ·) the steps, rows by step as :meth:`SegmentRows.by_step` has them.
            start: the states before the first of them, as rows.
            entering: the cotangents that come from behind the last of them, likewise.

        Returns:
            Those that go on to the step before the first.
        """
        width, (r, z) = self.width, self.gates.reset_update.chunk(2, -1)
        given = (chosen(x) for x in (self.chain.out, self.e, r, z, *self.gates, self.found))
        out, e, r, z, rz, n, hidden, found = given
        # In matrices of their own: not all products take rows from anywhere.
        made = entering.new_empty(min(len(out), max(1, _NEAR // (4 * entering.numel()))), len(entering), 4 * width)
        delta = entering + e[-1].reshape(entering.shape)
        d = delta.view(out.shape[1:])
        nothing, starts = delta.new_zeros(()), range(1, len(out), len(made))
        # The first step by itself: what is before it lies elsewhere.
        for low, high in reversed([(0, 1), *((low, min(low + len(made), len(out))) for low in starts)]):
            here = slice(low, high)
            whole = made[: high - low].view(-1, *d.shape[:-1], 4 * width)
            of_q_n, of_rz, of_n = whole.split([width, 2 * width, width], -1)
            of_r, of_z = of_rz.chunk(2, -1)
            through_tanh(torch.sub(1, z[here], out=of_n), n[here])
            torch.mul(of_n, hidden[here], out=of_r)
            torch.sub(out[low - 1 : high - 1] if low else start.view(1, *d.shape), n[here], out=of_z)
            through_sigmoid(of_rz, rz[here])
            torch.mul(of_n, r[here], out=of_q_n)
            e_before = e[low - 1 : high - 1].unbind(0) if low else (nothing,)
            four, of_q = whole.unflatten(-1, (4, width)).unbind(0), made[: high - low, :, : 3 * width].unbind(0)
            for step in reversed(range(high - low)):
                four[step].mul_(d.unsqueeze(-2))
                torch.addcmul(e_before[step], d, z[low + step], out=d)
                delta.addmm_(of_q[step], self.weight)
            found[here] = whole
        return delta
