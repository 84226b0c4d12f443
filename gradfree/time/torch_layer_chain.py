"""Chains in time of torch's own cells, with Jacobians in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.block_scan import Blocks
from gradfree.algebra.cotangents import Factor, is_number
from gradfree.chains.chain import ChainGradients
from gradfree.chains.memory import Memory
from gradfree.time.closed_forms import Linearised, Links, State, linearise, lstm_gates
from gradfree.time.forward import Recurrence, run_sequentially
from gradfree.time.gru_forward import Gates
from gradfree.time.time_chain import Factors, TimeChain, repeated


class TorchLayerChain(TimeChain):
    """The chain of one layer and direction of ``nn.RNN``, ``nn.GRU`` or ``nn.LSTM``.

    Args:
        mode: the cell, "RNN_TANH", "RNN_RELU", "GRU" or "LSTM".
        x: the layer's input, (T, B, I).
        out: h_1 to h_T, (T, B, H).
        first: h_0 and, for LSTM, c_0, (B, H).
        weights: W_ih, W_hh and, if the layer has them, b_ih, b_hh.
        wanted: whether the gradients of the input and of each weight are needed.
        memory: the chain's memory from pass to pass.
        gates: a GRU's gates if the forward pass kept them; else they are recomputed.
        valid: see :attr:`TimeChain.valid`.
    """

    def __init__(
        self,
        mode: str,
        x: Tensor,
        out: Tensor,
        first: Sequence[Tensor],
        weights: Sequence[Tensor],
        wanted: Sequence[bool],
        memory: Memory,
        gates: Gates | None = None,
        valid: Tensor | None = None,
    ):
        self.valid = valid
        super().__init__(len(x), out, memory)
        self.x, self.parameters, self.wanted = x, weights, wanted
        self.kind, self.out, self.first, self.gates = mode, out, first, gates
        self.states = [out] * len(first)

    @cached_property
    def cell(self) -> Linearised:
        """The Jacobians of all steps."""
        return linearise(self.kind, self.x, self.out, self.first, self.parameters, self.gates)

    @property
    def diagonal(self) -> Sequence[Factor]:
        """The diagonal of F_t that comes from the gates."""
        return self.cell.diagonal

    def rest_vjp(self, delta: State, factors: Factors) -> State:
        """Return δ_t (F_t - K_t) for t = 2..T: one matrix product with W_hh, the rest elementwise."""
        rest = [_difference(d, k) for d, k in zip(self.diagonal, factors, strict=True)]
        return self.cell.vjp(delta, rest, _LATER)

    def unit_blocks(self, carried: bool) -> Blocks:
        """Return the Jacobians of the gates and, without ``carried``, of the path through the diagonals of W_hh."""
        return self.cell.unit_blocks(carried)

    def jacobians(self) -> Tensor:
        """Return F_2 to F_T of every sequence, (T - 1, B, H, H); for LSTM of h and c concatenated."""
        found = self.cell.jacobians(_LATER)
        # Behind the end of a packed sequence products of W_hh may overflow, and no cotangent may come from there.
        return found if self.valid is None else found.masked_fill(~self.valid[1:, :, :, None], 0.0)

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """h_0 and h_T."""
        return self.first[0], self.out[-1]

    def run(self, initial: Sequence[Tensor] | None = None, parameters: Sequence[Tensor] | None = None) -> State:
        """Return the states of another pass over the same input, (T, B, H) each."""
        first = self.first if initial is None else initial
        weights = self.parameters if parameters is None else parameters
        with torch.no_grad():
            out, *_ = run_sequentially(Recurrence(self.x, [part[None] for part in first], weights, self.kind))
            if len(first) == 1:
                return (out,)
            w_ih, w_hh, *biases = weights
            sums = F.linear(self.x, w_ih) + F.linear(torch.cat([first[0][None], out[:-1]]), w_hh)
            return out, lstm_gates(sums + sum(biases), first[1]).c

    def sample_gradients(self, delta: State, steps: slice = slice(None), sets: int = 1) -> list[Tensor | None]:
        """Return δ_t ∂f_t/∂θ of each sequence: products of the cotangents of pre-activations with what they multiply.

        The cotangents of P and Q, (T, N · B, n · H), and x_t and h_{t-1} are the factors of ∂f_t/∂θ.
        """
        cell = self.cell.rearranged(lambda x: repeated(x[steps], sets), whole=True)
        cell.factors = cell.factors.clone()  # Overwritten.
        hidden = cell.hidden_cotangent(delta)
        fed = cell.input_cotangent(delta, hidden.clone())
        before = torch.cat([self.first[0][None], self.out[:-1]])[steps]
        pairs = [(fed, self.x[steps]), (hidden, before), (fed, None), (hidden, None)][: len(self.parameters)]
        _, *wanted = self.wanted
        return [_of_samples(*pair, sets) if want else None for pair, want in zip(pairs, wanted, strict=True)]

    def rearranged(self, change: Callable[[Tensor], Tensor]) -> Links:
        """Return the links in another order."""
        return self.cell.rearranged(change)

    def gradients(self, delta: State) -> ChainGradients:
        """Return δ_t ∂f_t/∂θ summed over t, the inputs' gradients, and those of the initial state."""
        self.record_delta(delta)
        initial = tuple(self.cell.initial_cotangent(delta))
        # The cached Jacobians are overwritten, so the cache is dropped: a later access recomputes them.
        cell = vars(self).pop("cell")
        hidden = cell.hidden_cotangent(delta)
        of_x, of_w_ih, of_w_hh, *of_biases = self.wanted
        of_b_ih, of_b_hh = of_biases or (False, False)
        w_hh = _product(hidden[1:], self.out[:-1]).addmm_(hidden[0].t(), self.first[0]) if of_w_hh else None
        b_hh = hidden.sum((0, 1)) if of_b_hh else None
        fed = cell.input_cotangent(delta, hidden)
        w_ih = _product(fed, self.x) if of_w_ih else None
        b_ih = fed.sum((0, 1)) if of_b_ih else None
        inputs = [fed @ self.parameters[0] if of_x else None]
        parameters = [w_ih, w_hh, b_ih, b_hh][: len(self.parameters)]
        return ChainGradients(initial, inputs, parameters)


def _product(cotangent: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the weight of a linear map of ``x``, summed over steps and sequences."""
    return cotangent.flatten(0, 1).t() @ x.flatten(0, 1)


def _of_samples(cotangent: Tensor, x: Tensor | None, sets: int) -> Tensor:
    """Return the sums over steps of the products, (B, N, K, J), or without ``x`` of the cotangents, (B, N, K)."""
    cotangent = cotangent.unflatten(1, (sets, -1))
    return cotangent.sum(0).transpose(0, 1) if x is None else torch.einsum("tnbk,tbj->bnkj", cotangent, x)


def _difference(diagonal: Factor, known: Factor) -> Factor:
    """Return ``diagonal`` - ``known``; zero costs no computation."""
    if known is diagonal:
        return 0.0
    return diagonal if is_number(known, 0.0) else diagonal - known


_LATER = slice(1, None)
