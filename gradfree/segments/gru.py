"""The forward pass of a GRU in segments on a CPU, without copies, with the gates kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.convergence.outcome import largest
from gradfree.segments.layout import SegmentRows
from gradfree.segments.multiple_shooting import SweepResult
from gradfree.segments.rule import SegmentPlan
from gradfree.time.forward import Recurrence, Trajectory
from gradfree.time.gru_forward import Gates, is_batch_major


class GRUSegments:
    """A GRU in segments, and the remaining steps.

    Nothing is copied: each step writes to its final place in the (T, B, ·) tensors.

    Args:
        recurrence: in one direction.
        plan: the number of segments and of burn-in steps.
    """

    def __init__(self, recurrence: Recurrence, plan: SegmentPlan):
        self.recurrence, self.count, self.burn = recurrence, plan.count, plan.burn
        self.rows = SegmentRows(plan.count, is_batch_major(recurrence.x))
        self.covered = len(recurrence.x) // plan.count * plan.count
        self.first = recurrence.first[0][0]
        self.width = self.first.shape[-1]
        _, w_hh, *biases = recurrence.weights
        self.weight, self.bias = w_hh.t(), biases[1] if biases else w_hh.new_zeros(())
        self.fed: Tensor | None = self._fed()

    def guess(self) -> list[Tensor]:
        """Return the first guess of entering states: a burn-in from zero through each segment's last steps."""
        end = self.first.new_zeros(self.count, *self.first.shape)
        if self.burn:
            assert self.fed is not None
            fed = self.rows.by_step(self.fed[: self.covered])[-self.burn :]
            # All steps share one buffer: each overwrites the results of the one before.
            room = fed.new_empty(*fed.shape[1:-1], 5 * self.width).expand(len(fed), *[-1] * (fed.dim() - 1))
            gates, hidden, out = room.split([3 * self.width, self.width, self.width], -1)
            end = self.rows.to_states(self._steps(fed, gates, hidden, out, self.rows.from_states(end)))
        return [torch.cat([self.first[None], end[:-1]])]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run all segments from the entering states."""
        # r, z and n overwrite their pre-activations, so another run recomputes those.
        self.gates, self.fed = self._fed() if self.fed is None else self.fed, None
        self.hidden, out = (self.rows.empty(self.gates, self.width) for _ in range(2))
        gates, hidden, h = (self.rows.by_step(whole[: self.covered]) for whole in (self.gates, self.hidden, out))
        leaving = self.rows.to_states(self._steps(gates, gates, hidden, h, self.rows.from_states(entering[0])))
        return SweepResult(out, [leaving], [largest(out[: self.covered])])

    def gate_products(self) -> Sequence[Factor]:
        """Return the products of the update gates over each segment."""
        z = self.gates[: self.covered, :, self.width : 2 * self.width]
        return [z.unflatten(0, (self.count, -1)).prod(1)]

    def trajectory(self, out: Tensor) -> Trajectory:
        """Run the remaining steps after the segments; return the trajectory of all steps."""
        if self.covered < len(out):
            gates, hidden, h = (part[self.covered :] for part in (self.gates, self.hidden, out))
            self._steps(gates, gates, hidden, h, out[self.covered - 1])
        reset_update, new = self.gates.split([2 * self.width, self.width], -1)
        return Trajectory(out, [out[-1:].clone()], Gates(reset_update, new, self.hidden))

    def _fed(self) -> Tensor:
        """Return the pre-activations' part that comes from the inputs, P (T, B, 3H)."""
        w_ih, _, *biases = self.recurrence.weights
        x = self.recurrence.x
        return self.rows.from_matrix(F.linear(self.rows.to_matrix(x), w_ih, biases[0] if biases else None), len(x))

    def _steps(self, fed: Tensor, gates: Tensor, hidden: Tensor, out: Tensor, h: Tensor) -> Tensor:
        """Run some steps of all segments.

        Args:
            fed: P, by step as :meth:`SegmentRows.by_step` returns it.
            gates: takes r, z and n, by step.
            hidden: takes Q_n, by step.
            out: takes h, by step.
            h: the states before the first step, as rows.

        Returns:
            The states after the last step, as rows.
        """
        q, split = h.new_empty(len(h), 3 * self.width), [2 * self.width, self.width]
        state = h.view(*out.shape[1:-1], -1)
        q_rz, q_n = q.view(*out.shape[1:-1], -1).split(split, -1)
        matrix = state.dim() == 2
        views = (*fed.split(split, -1), *gates.split(split, -1), *gates.split(self.width, -1)[:2], hidden, out)
        for p_rz, p_n, rz, n, r, z, kept, after in zip(*(whole.unbind(0) for whole in views), strict=True):
            torch.addmm(self.bias, h, self.weight, out=q)
            torch.add(p_rz, q_rz, out=rz).sigmoid_()
            kept.copy_(q_n)
            torch.addcmul(p_n, r, q_n, out=n).tanh_()
            if matrix:
                h = state = torch.lerp(n, state, z, out=after)
            else:
                state = torch.lerp(n, state, z)
                after.copy_(state)
                h = state.flatten(0, 1)
        return h
