"""A GRU in segments on a CPU: the forward pass keeps the gates, and the backward pass takes derivatives from them.

Nothing is copied: each step reads and writes its place in (T, B, ·) tensors. The backward pass computes local
derivatives in small chunks of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.cotangents import Factor
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import largest, largest_of_rows
from gradfree.devices.costs import costs_of
from gradfree.segments.layout import SegmentRows
from gradfree.segments.multiple_shooting import SweepResult
from gradfree.segments.rule import SegmentPlan
from gradfree.time.closed_forms import State, through_sigmoid, through_tanh
from gradfree.time.forward import Recurrence, Trajectory
from gradfree.time.gru_forward import Gates
from gradfree.time.layer_input import is_batch_major
from gradfree.time.torch_layer_chain import TorchLayerChain


class GRUSegments:
    """The forward pass in segments of a GRU, and the remaining steps.

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
        sizes = largest_of_rows(out[: self.covered].unflatten(0, (self.count, -1)))
        return SweepResult(out, [leaving], [sizes])

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


class GRUSegmentsBackward:
    """The backward pass in segments of a GRU whose gates were kept.

    The remaining steps at the end of the sequence run first, step by step.

    Args:
        chain: the GRU's chain.
        gates: its gates.
        direct: the direct cotangents.
        plan: the number of segments and of burn-in steps.
    """

    def __init__(self, chain: TorchLayerChain, gates: Gates, direct: State, plan: SegmentPlan):
        self.chain, self.gates, self.burn = chain, gates, plan.burn
        self.rows = SegmentRows(plan.count, is_batch_major(gates.hidden))
        # With two directions, ``out`` and ``e`` are parts of larger tensors.
        self.out, self.e = self.rows.in_layout(chain.out), self.rows.in_layout(direct[0])
        self.covered = len(chain) // plan.count * plan.count
        self.width = self.out.shape[-1]
        # The cotangents of Q_n, P_r, P_z and P_n, concatenated: the first three are those of Q, the last three of P.
        self.cotangents = self.rows.empty(self.out, 4 * self.width)
        self.weight = chain.parameters[1].roll(self.width, 0)
        self.sizes = largest_of_rows(self.e[: self.covered].unflatten(0, (plan.count, -1)))
        ends = self.out[: self.covered].unflatten(0, (plan.count, -1))[:-1, -1]
        self.starts = self.rows.from_states(torch.cat([chain.first[0][None], ends]))
        self.last = torch.zeros_like(chain.first[0])
        if self.covered < len(chain):
            self.last = self._steps(lambda x: x[self.covered :], self.out[self.covered - 1], self.last)
            self.sizes[-1] = torch.maximum(self.sizes[-1], largest(self.e[self.covered :]))

    def guess(self) -> list[Tensor]:
        """Return the first guess of entering cotangents: a burn-in from zero through each segment's first steps."""
        entering = self.last.new_zeros(self.rows.count, *self.last.shape)
        if self.burn:
            entering[:-1] = self._sweep(self.burn, entering)[1:]
        entering[-1] = self.last
        return [entering]

    def run(self, entering: Sequence[Tensor]) -> SweepResult:
        """Run the VJPs of all segments from the entering cotangents."""
        leaving = self._sweep(self.covered, entering[0])
        return SweepResult(leaving[0], [leaving], [torch.maximum(largest_of_rows(leaving), self.sizes)])

    def gate_products(self) -> Sequence[Factor]:
        """Return the products of the update gates over each segment."""
        z = self.gates.reset_update[: self.covered, :, self.width :]
        return [z.unflatten(0, (self.rows.count, -1)).prod(1)]

    def gradients(self, initial: Tensor) -> ChainGradients:
        """Return the chain's gradients, given that of the initial state."""
        chain, width = self.chain, self.width
        of_x, of_w_ih, of_w_hh, *of_biases = chain.wanted
        w_hh = self._of_weight().roll(-width, 0) if of_w_hh else None
        cotangents = self.rows.to_matrix(self.cotangents)
        fed, sums = cotangents[:, width:], cotangents.sum(0) if any(of_biases) else None
        inputs = self.rows.from_matrix(fed @ chain.parameters[0], len(chain)) if of_x else None
        parameters = [fed.t() @ self.rows.to_matrix(chain.x) if of_w_ih else None, w_hh]
        if sums is not None:
            both = sums[width:], sums[: 3 * width].roll(-width)
            parameters += [own if want else None for own, want in zip(both, of_biases, strict=True)]
        return ChainGradients((initial,), [inputs], [*parameters, None, None][: len(chain.parameters)])

    def _of_weight(self) -> Tensor:
        """Return the gradient of W_hh with its rows in the order of :attr:`weight`."""
        of_q, out = self.cotangents[..., : 3 * self.width], self.out
        total = of_q[0].t() @ self.chain.first[0]
        if not self.rows.batch_major:
            return total.addmm_(of_q[1:].flatten(0, 1).t(), out[:-1].flatten(0, 1))
        for cotangents, states in zip(of_q[1:].unbind(1), out[:-1].unbind(1), strict=True):
            total.addmm_(cotangents.t(), states)
        return total

    def _sweep(self, steps: int, entering: Tensor) -> Tensor:
        """Run the VJPs of each segment's first ``steps`` from ``entering``; return what leaves them, (C, B, H)."""
        rows = self.rows.from_states(entering)
        return self.rows.to_states(
            self._steps(lambda x: self.rows.by_step(x[: self.covered])[:steps], self.starts, rows)
        )

    def _steps(self, chosen: Callable[[Tensor], Tensor], start: Tensor, entering: Tensor) -> Tensor:
        """Run the VJPs of some steps of some segments, and write to ``self.cotangents``.

        Args:
            chosen: selects these steps from a tensor (T, B, ·), by step as :meth:`SegmentRows.by_step` returns them.
            start: the states before the first of these steps, as rows.
            entering: the cotangents that enter the last of these steps, as rows.

        Returns:
            The cotangents that leave the first of these steps, as rows.
        """
        width, (r, z) = self.width, self.gates.reset_update.chunk(2, -1)
        given = (chosen(x) for x in (self.out, self.e, r, z, *self.gates, self.cotangents))
        out, e, r, z, rz, n, hidden, cotangents = given
        # A separate buffer of contiguous matrices, as not all matrix products accept the strides of ``cotangents``.
        most = max(1, costs_of(out.device).cached_numbers // (4 * entering.numel()))
        buffer = entering.new_empty(min(len(out), most), len(entering), 4 * width)
        delta = entering + e[-1].reshape(entering.shape)
        d = delta.view(out.shape[1:])
        nothing, starts = delta.new_zeros(()), range(1, len(out), len(buffer))
        # The first step runs separately: the state before it is in ``start``.
        for low, high in reversed([(0, 1), *((low, min(low + len(buffer), len(out))) for low in starts)]):
            here = slice(low, high)
            whole = buffer[: high - low].view(-1, *d.shape[:-1], 4 * width)
            before = out[low - 1 : high - 1] if low else start.view(1, *d.shape)
            self._write_derivatives(whole, before, *(gate[here] for gate in (r, z, rz, n, hidden)))
            e_before = e[low - 1 : high - 1].unbind(0) if low else (nothing,)
            four, of_q = whole.unflatten(-1, (4, width)).unbind(0), buffer[: high - low, :, : 3 * width].unbind(0)
            for step in reversed(range(high - low)):
                four[step].mul_(d.unsqueeze(-2))
                torch.addcmul(e_before[step], d, z[low + step], out=d)
                delta.addmm_(of_q[step], self.weight)
            cotangents[here] = whole
        return delta

    def _write_derivatives(
        self, into: Tensor, before: Tensor, r: Tensor, z: Tensor, rz: Tensor, n: Tensor, hidden: Tensor
    ) -> None:
        """Write the derivatives of h_t by Q_n, P_r, P_z and P_n: h_t = n + z (h_{t-1} - n), n = tanh(P_n + r Q_n)."""
        of_q_n, of_rz, of_n = into.split([self.width, 2 * self.width, self.width], -1)
        of_r, of_z = of_rz.chunk(2, -1)
        through_tanh(torch.sub(1, z, out=of_n), n)
        torch.mul(of_n, hidden, out=of_r)
        torch.sub(before, n, out=of_z)
        through_sigmoid(of_rz, rz)
        torch.mul(of_n, r, out=of_q_n)
