"""Jacobians of torch's recurrent cells in closed form, for all steps of a sequence at once.

All three cells compute h' from the pre-activations P = x W_ihᵀ + b_ih and Q = h W_hhᵀ + b_hh and, elementwise, from
the previous state. So the cotangents of P and Q are elementwise products. The only dense part of a VJP with F_t is the
product of Q's cotangent with W_hh.

States are tuples, (h,) or for LSTM (h, c); all tensors are time-major, (T, B, ·).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.block_scan import Blocks
from gradfree.algebra.cotangents import Factor, plus, times
from gradfree.algebra.time_scan import scan
from gradfree.time.gru_forward import Gates

State = tuple[Any, ...]
"""Cotangents of a state's parts, each a tensor (T, B, H), or ``None`` for zero; that of h is always a tensor."""


_Self = TypeVar("_Self", bound="Linearised")


class Links(ABC):
    """Links whose VJPs are computed step by step, for any number of steps and sequences."""

    @abstractmethod
    def unroll(self, direct: State, entering: Sequence[Tensor] | None = None) -> State:
        """Return the exact δ_t = e_t + δ_{t+1} F_{t+1} of the first ``len(direct[0])`` steps.

        Args:
            direct: e, part by part.
            entering: the cotangent that enters the last of these steps, part by part, (B, H). ``None``: zero.
        """

    @abstractmethod
    def initial_cotangent(self, delta: State) -> Sequence[Tensor]:
        """Return δ_1 F_1, part by part, (B, H)."""

    @abstractmethod
    def jvp(self, tangents: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        """Return F_t w of one step, part by part, (B, H)."""


class Linearised(Links):
    """The Jacobians of all steps of one layer.

    Args:
        weight: W_hh.
    """

    links: tuple[str, ...]
    """The names of the attributes that, with W_hh, define F_t: tensors (T, B, ...)."""

    others: tuple[str, ...] = ()
    """The names of more such attributes, which only the cotangents of P and Q use."""

    factors: Tensor
    """The cotangents of Q's n parts are these, (T, B, n, H), times what :meth:`sources` returns."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    @property
    @abstractmethod
    def diagonal(self) -> tuple[Factor, ...]:
        """The diagonal of F_t that comes from the cell's gates, by part of the state: (T, B, H), or 0.0."""

    def rearranged(self: _Self, change: Callable[[Tensor], Tensor], whole: bool = False) -> _Self:
        """Return the same Jacobians with ``change`` applied to each tensor, which reorders steps and sequences.

        Args:
            change: of a tensor (T, B, ...).
            whole: whether the result must have the cotangents of P and Q, too.
        """
        other = copy(self)
        for name in (*self.links, *self.others) if whole else self.links:
            setattr(other, name, change(getattr(self, name)))
        return other

    def initial_cotangent(self, delta: State) -> Sequence[Tensor]:
        """Return δ_1 F_1, part by part, (B, H)."""
        return [part[0] for part in self.vjp(delta, self.diagonal, slice(0, 1))]

    def vjp(self, delta: State, diagonal: Sequence[Factor], steps: slice) -> State:
        """Return δ_t F_t at ``steps``, with ``diagonal`` in place of the gates' diagonal."""
        parts = list(self.cross_terms(delta, steps))
        for n, (part, d) in enumerate(zip(delta, diagonal, strict=True)):
            parts[n] = plus(parts[n], times(_at(part, steps), _at(d, steps)))
        hidden = (self.factors[steps] * self.sources(delta, steps)).flatten(-2)
        parts[0] = plus(hidden @ self.weight, parts[0])
        return tuple(parts)

    def jvp(self, tangents: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        """Return F_t w: the gates' diagonal times w, and the factors times W_hh w, summed over Q's parts."""
        (w,), (gate,) = tangents, self.diagonal
        through = (self.factors[step] * self.fed_tangent(w)).sum(-2)
        return [through if not isinstance(gate, Tensor) else torch.addcmul(through, gate[step], w)]

    def fed_tangent(self, tangent: Tensor) -> Tensor:
        """Return W_hh w for each of Q's parts, (B, n, H)."""
        return (tangent @ self.weight.t()).unflatten(-1, (-1, tangent.shape[-1]))

    def sources(self, delta: State, steps: slice) -> Tensor:
        """Return the cotangents at ``steps`` that reach Q's parts, (T, B, n, H); by default that of h' for all."""
        return delta[0][steps].unsqueeze(-2)

    def hidden_cotangent(self, delta: State) -> Tensor:
        """Return the cotangent of Q, (T, B, n · H), in the memory of :attr:`factors`, which are invalid after it."""
        return self.factors.mul_(delta[0].unsqueeze(-2)).flatten(-2)

    def input_cotangent(self, delta: State, hidden: Tensor) -> Tensor:
        """Return the cotangent of P at all steps from ``hidden``, that of Q, which may be overwritten."""
        return hidden

    def cross_terms(self, delta: State, steps: slice) -> State:
        """Return the elementwise part of the VJP from one part of δ_t to another part of the previous state."""
        return (None,) * len(self.diagonal)

    @abstractmethod
    def unit_blocks(self, carried: bool) -> Blocks:
        """Return the unit-by-unit Jacobians: from the gates and, without ``carried``, from the diagonals of W_hh."""

    @abstractmethod
    def jacobians(self, steps: slice) -> Tensor:
        """Return F_t at ``steps``, (·, B, H, H) for row vectors δ_t, all parts concatenated."""


class LinearisedRNN(Linearised):
    """h' = tanh(P + Q) or ReLU(P + Q); nothing bypasses W_hh."""

    links = ("factors",)
    diagonal = (0.0,)

    def __init__(self, h: Tensor, relu: bool, weight: Tensor):
        super().__init__(weight)
        # As autograd has it for NaN.
        slope = (~(h <= 0)).to(h.dtype) if relu else 1 - h * h
        self.factors = slope.unsqueeze(-2)

    def unit_blocks(self, carried: bool) -> Blocks:
        """Return diag(φ') diag(W_hh)."""
        return [[None if carried else _sum_on_diagonals(self.factors, self.weight)]]

    def jacobians(self, steps: slice) -> Tensor:
        """Return diag(φ') W_hh."""
        return _sum_of_scaled(self.factors[steps], self.weight)

    def unroll(self, direct: State, entering: Sequence[Tensor] | None = None) -> State:
        """Return the exact δ."""
        delta = _with_entering(direct[0].clone(), entering, 0)
        steps, slopes = delta.unbind(0), self.factors.squeeze(-2).unbind(0)
        for t in range(len(steps) - 1, 0, -1):
            steps[t - 1].addmm_(steps[t] * slopes[t], self.weight)
        return (delta,)


class LinearisedGRU(Linearised):
    """h' = (1-z)⊙n + z⊙h with n = tanh(P_n + r⊙Q_n); K = z (Highway-BP, arXiv 2501.17086, Table 1)."""

    links = ("factors", "carry")
    others = ("new",)

    def __init__(self, gates: Gates, before: Tensor, weight: Tensor, buffer: Tensor | None = None):
        """Linearise at ``before``, the states before all steps, in ``buffer`` (T, B, 3H), which may end in Q_n."""
        super().__init__(weight)
        (r, z), n = gates.reset_update.chunk(2, -1), gates.new
        self.new = through_tanh(1 - z, n)
        # The cotangents of Q's three parts are δ times these factors.
        buffer = n.new_empty(*n.shape[:-1], 3 * n.shape[-1]) if buffer is None else buffer
        self.factors = buffer.unflatten(-1, (3, -1))
        f_r, f_z, f_n = self.factors.unbind(-2)
        through_sigmoid(torch.mul(self.new, gates.hidden, out=f_r), r)
        through_sigmoid(torch.sub(before, n, out=f_z), z)
        torch.mul(self.new, r, out=f_n)
        self.carry = z

    @property
    def diagonal(self) -> tuple[Factor, ...]:
        """The update gate."""
        return (self.carry,)

    def input_cotangent(self, delta: State, hidden: Tensor) -> Tensor:
        """Return Q's cotangent, except that of n, where Q_n has the factor r and P_n does not."""
        torch.mul(delta[0], self.new, out=hidden[..., -self.new.shape[-1] :])
        return hidden

    def unit_blocks(self, carried: bool) -> Blocks:
        """Return diag(z), and the three factors times the diagonals."""
        return [[self.carry if carried else self.carry + _sum_on_diagonals(self.factors, self.weight)]]

    def jacobians(self, steps: slice) -> Tensor:
        """Return diag(z) + Σ diag(factor) W_hh over the three parts."""
        jacobians = _sum_of_scaled(self.factors[steps], self.weight)
        jacobians.diagonal(0, -2, -1).add_(self.carry[steps])
        return jacobians

    def unroll(self, direct: State, entering: Sequence[Tensor] | None = None) -> State:
        """Return the exact δ."""
        delta = torch.empty_like(direct[0])
        delta[-1] = direct[0][-1]
        _with_entering(delta, entering, 0)
        e, steps, factors, z = (x.unbind(0) for x in (direct[0], delta, self.factors, self.carry))
        for t in range(len(steps) - 1, 0, -1):
            torch.addcmul(e[t - 1], steps[t], z[t], out=steps[t - 1])
            steps[t - 1].addmm_((factors[t] * steps[t].unsqueeze(-2)).flatten(-2), self.weight)
        return (delta,)


class LinearisedLSTM(Linearised):
    """c' = f⊙c + i⊙g, h' = o⊙tanh(c'); K = f on c, 0 on h (Highway-BP, arXiv 2501.17086, Table 1)."""

    links = ("factors", "out", "carry")

    def __init__(self, gates: LSTMGates, c0: Tensor, weight: Tensor):
        super().__init__(weight)
        i, f, g, o, c, tanh_c = gates
        before = torch.cat([c0.unsqueeze(0), c[:-1]])
        self.out = o * (1 - tanh_c * tanh_c)
        # The cotangents of Q's four parts are those of (c', c', c', h') times these factors.
        self.factors = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], -2)
        self.carry = f

    @property
    def diagonal(self) -> tuple[Factor, ...]:
        """The forget gate, for c only."""
        return 0.0, self.carry

    def sources(self, delta: State, steps: slice) -> Tensor:
        """Return the cotangents of c', c', c' and h'."""
        of_c = self._of_cell(delta, steps)
        return torch.stack([of_c, of_c, of_c, delta[0][steps]], -2)

    def jvp(self, tangents: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        """Return F_t w of h' and c'; h' also gets what c' gets, times its derivative."""
        fed = self.factors[step] * self.fed_tangent(tangents[0])
        of_c = torch.addcmul(fed[..., :3, :].sum(-2), self.carry[step], tangents[1])
        return [torch.addcmul(fed[..., 3, :], self.out[step], of_c), of_c]

    def hidden_cotangent(self, delta: State) -> Tensor:
        """Return the cotangent of Q, in the memory of the factors."""
        self.factors[..., :3, :].mul_(self._of_cell(delta, slice(None)).unsqueeze(-2))
        self.factors[..., 3, :].mul_(delta[0])
        return self.factors.flatten(-2)

    def _of_cell(self, delta: State, steps: slice) -> Tensor:
        """Return the cotangent of c', including the path through h'."""
        h, cell = delta[0][steps], delta[1]
        return h * self.out[steps] if cell is None else torch.addcmul(cell[steps], h, self.out[steps])

    def cross_terms(self, delta: State, steps: slice) -> State:
        """Return the VJP from h' to c: δ ⊙ o ⊙ (1 - tanh²c') ⊙ f."""
        return None, delta[0][steps] * self.out[steps] * self.carry[steps]

    def unit_blocks(self, carried: bool) -> Blocks:
        """Return the derivatives of h' and c' with respect to c and, through the diagonals of W_hh, to h."""
        of_c = [self.out * self.carry, self.carry]
        if carried:
            return [[None, block] for block in of_c]
        weight, width = self.weight, self.carry.shape[-1]
        c_h = _sum_on_diagonals(self.factors[..., :3, :], weight[: 3 * width])
        h_h = torch.addcmul(_sum_on_diagonals(self.factors[..., 3:, :], weight[3 * width :]), c_h, self.out)
        return [[h_h, of_c[0]], [c_h, of_c[1]]]

    def jacobians(self, steps: slice) -> Tensor:
        """Return the Jacobians of h' and c' with respect to h, through the four factors, and to c, unit by unit."""
        factors, out, f, weight = self.factors[steps], self.out[steps], self.carry[steps], self.weight
        width = f.shape[-1]
        jacobians = _at_least_float32(f).new_zeros(*f.shape[:-1], 2 * width, 2 * width)
        (of_h_h, of_h_c), (of_c_h, of_c_c) = (rows.split(width, -1) for rows in jacobians.split(width, -2))
        of_c_h.copy_(_sum_of_scaled(factors[..., :3, :], weight[: 3 * width]))
        of_h_h.copy_(_sum_of_scaled(factors[..., 3:, :], weight[3 * width :])).addcmul_(of_c_h, out.unsqueeze(-1))
        of_h_c.diagonal(0, -2, -1).copy_(out * f)
        of_c_c.diagonal(0, -2, -1).copy_(f)
        return jacobians

    def unroll(self, direct: State, entering: Sequence[Tensor] | None = None) -> State:
        """Return the exact δ."""
        delta_h = _with_entering(direct[0].clone(), entering, 0)
        delta_c = _with_entering(torch.zeros_like(delta_h) if direct[1] is None else direct[1].clone(), entering, 1)
        cs, hs, outs, fs = (x.unbind(0) for x in (delta_c, delta_h, self.out, self.carry))
        factors = self.factors.unbind(0)
        for t in range(len(hs) - 1, 0, -1):
            whole = torch.addcmul(cs[t], hs[t], outs[t])
            cs[t - 1].addcmul_(whole, fs[t])
            parts = torch.stack([whole, whole, whole, hs[t]], -2)
            hs[t - 1].addmm_((factors[t] * parts).flatten(-2), self.weight)
        return delta_h, delta_c


def _at(x: Any, steps: slice) -> Any:
    """Return ``x`` at ``steps``; return ``x`` itself if it has no time dimension."""
    return x[steps] if isinstance(x, Tensor) and x.dim() == 3 else x


def _with_entering(delta: Tensor, entering: Sequence[Tensor] | None, part: int) -> Tensor:
    """Add the entering cotangent to δ of the last step, in place."""
    if entering is not None:
        delta[-1] += entering[part]
    return delta


def through_tanh(cotangent: Tensor, y: Tensor) -> Tensor:
    """Multiply ``cotangent`` by tanh' = 1 - y², in place."""
    return torch.ops.aten.tanh_backward.grad_input(cotangent, y, grad_input=cotangent)


def through_sigmoid(cotangent: Tensor, y: Tensor) -> Tensor:
    """Multiply ``cotangent`` by σ' = y (1 - y), in place."""
    return torch.ops.aten.sigmoid_backward.grad_input(cotangent, y, grad_input=cotangent)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sum_on_diagonals(factors: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over n of factors_n ⊙ diag(weight_n), for factors (·, B, n, H) and weight (n · H, H)."""
    return (factors * weight.unflatten(0, (factors.shape[-2], -1)).diagonal(0, -2, -1)).sum(-2)


def _sum_of_scaled(factors: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over n of diag(factors_n) weight_n, for factors (·, B, n, H) and weight (n · H, H)."""
    wide = _at_least_float32(factors)
    each = zip(wide.unsqueeze(-1).unbind(-3), weight.to(wide.dtype).chunk(factors.shape[-2]), strict=True)
    factor, part = next(each)
    total = factor * part
    for factor, part in each:
        total.addcmul_(factor, part)
    return total


def recompute_gates(p: Tensor, q: Tensor) -> Gates:
    """Return a GRU's gates from its pre-activations P and Q; overwrites P."""
    width = p.shape[-1] // 3
    reset_update, new = p.split([2 * width, width], -1)
    hidden = q[..., 2 * width :]
    reset_update.add_(q[..., : 2 * width]).sigmoid_()
    new.addcmul_(reset_update[..., :width], hidden).tanh_()
    return Gates(reset_update, new, hidden)


class LSTMGates(NamedTuple):
    """The gates, c and tanh(c) of all steps of an LSTM, (T, B, H) each."""

    input: Tensor
    forget: Tensor
    new: Tensor
    output: Tensor
    c: Tensor
    tanh_c: Tensor


def lstm_gates(sums: Tensor, c0: Tensor) -> LSTMGates:
    """Return an LSTM's gates and c of all steps; torch's kernel returns only the last c, so a scan recomputes it.

    Args:
        sums: P + Q, (T, B, 4H).
        c0: the initial c, (B, H).
    """
    i, f, g, o = sums.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    first = torch.addcmul(i[:1] * g[:1], f[:1], c0)
    c = scan(torch.cat([first, i[1:] * g[1:]]), f)
    return LSTMGates(i, f, g, o, c, c.tanh())


def linearise(
    mode: str,
    x: Tensor,
    out: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    gates: Gates | None,
) -> Linearised:
    """Return the Jacobians of all steps; arguments as in :class:`~gradfree.time.torch_layer_chain.TorchLayerChain`."""
    w_ih, w_hh, *biases = weights
    if mode.startswith("RNN"):
        return LinearisedRNN(out, mode == "RNN_RELU", w_hh)
    before = torch.cat([first[0].unsqueeze(0), out[:-1]])
    if gates is not None:
        return LinearisedGRU(gates, before, w_hh)
    b_ih, b_hh = biases or (None, None)
    p, q = F.linear(x, w_ih, b_ih), F.linear(before, w_hh, b_hh)
    if mode == "GRU":
        return LinearisedGRU(recompute_gates(p, q), before, w_hh, buffer=q)
    return LinearisedLSTM(lstm_gates(p + q, first[1]), first[1], w_hh)
