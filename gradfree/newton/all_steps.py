"""One Newton sweep: evaluates a cell at all steps at once from the current guess of the states, and corrects it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradfree.algebra.block_scan import Blocks, block_scan, clamped
from gradfree.devices.costs import costs_of
from gradfree.time.cell_chain import check_batched_states
from gradfree.time.cell_layer import ElementwiseCell, apply_cell, unit_blocks
from gradfree.time.closed_forms import LinearisedGRU, LinearisedLSTM, LinearisedRNN, lstm_gates, recompute_gates
from gradfree.time.forward import Recurrence

Guess = Sequence[Tensor]
"""The states after all steps, part by part, (T, B, H)."""


class AllSteps(ABC):
    """Newton's method on a recurrence.

    Args:
        recurrence: in one direction.
        jacobian: the approximation K of F, "gate" or "diagonal".
    """

    def __init__(self, recurrence: Recurrence, jacobian: str):
        self.recurrence, self.jacobian, self.x = recurrence, jacobian, recurrence.x
        self.first = [part[0] for part in recurrence.first]

    def start(self) -> Guess:
        """Return the first guess, f(0, x_t) for all steps but the first, which uses the initial state."""
        zeros = [torch.zeros_like(part).expand(len(self.x), *part.shape) for part in self.first]
        return self.step(zeros)[1]

    def sweep(self, guess: Guess) -> Guess:
        """Return h + (I - K)⁻¹ (f(h) - h) for the guess h."""
        base, after, blocks = self.step(guess)
        if blocks is None:
            return after
        changes = block_scan([new - old for new, old in zip(after, base, strict=True)], blocks)
        return [old + change for old, change in zip(base, changes, strict=True)]

    @abstractmethod
    def step(self, guess: Guess) -> tuple[Guess, Guess, Blocks | None]:
        """Return h from the guess, f(h), and K at all steps, ``None`` if it is zero."""

    def before(self, guess: Guess) -> list[Tensor]:
        """Return the states before all steps."""
        return [torch.cat([f.unsqueeze(0), part[:-1]]) for f, part in zip(self.first, guess, strict=True)]


class TorchCellSteps(AllSteps):
    """Newton's method on torch's cells. For an LSTM only h is guessed: given the gates, c is one scan."""

    def __init__(self, recurrence: Recurrence, jacobian: str):
        super().__init__(recurrence, jacobian)
        w_ih, self.weight, *biases = recurrence.weights
        b_ih, b_hh = biases or (None, None)
        self.bias: Tensor | None = b_hh
        self.p = F.linear(self.x, w_ih, b_ih)

    def step(self, guess: Guess) -> tuple[Guess, Guess, Blocks | None]:
        """Return h from the guess, f(h) and K; for LSTM of h and c, with c from the scan."""
        (before, *_) = self.before(guess)
        if self.recurrence.mode == "LSTM":
            lstm = lstm_gates(self.p + F.linear(before, self.weight, self.bias), self.first[1])
            base, found = (guess[0], lstm.c), (lstm.output * lstm.tanh_c, lstm.c)
            if self.jacobian == "gate":
                # The gates carry only the error of c, which is zero.
                return base, found, None
            cell = LinearisedLSTM(lstm, self.first[1], self.weight)
            return base, found, clamped(cell.unit_blocks(carried=False))

        def run(steps: slice) -> tuple[Guess, Blocks]:
            h, cell = self._linearised(self.p[steps], before[steps])
            return (h,), cell.unit_blocks(self.jacobian == "gate")

        after, blocks = _in_chunks(run, before)
        return guess, after, clamped(blocks)

    def _linearised(self, p: Tensor, before: Tensor) -> tuple[Tensor, LinearisedRNN | LinearisedGRU]:
        """Return h' and the Jacobians at some steps of an RNN or a GRU."""
        q = F.linear(before, self.weight, self.bias)
        if self.recurrence.mode == "GRU":
            gates = recompute_gates(p.clone(), q)
            h = torch.lerp(gates.new, before, gates.reset_update[..., before.shape[-1] :])
            return h, LinearisedGRU(gates, before, self.weight, buffer=q)
        relu = self.recurrence.mode == "RNN_RELU"
        h = torch.relu(p + q) if relu else torch.tanh(p + q)
        return h, LinearisedRNN(h, relu, self.weight)


class ElementwiseSteps(AllSteps):
    """Newton's method on an elementwise cell; ``fed``, which mixes units, is computed once."""

    def __init__(self, recurrence: Recurrence, jacobian: str):
        super().__init__(recurrence, jacobian)
        assert isinstance(recurrence.cell, ElementwiseCell)
        self.cell = recurrence.cell
        with torch.enable_grad():  # As the first step of run_steps.
            self.fed = self.cell.fed(self.x).detach()

    def start(self) -> Guess:
        """Return the first guess.

        Raises:
            ChainError: the cell returns other states when it runs on all steps as one batch.
        """
        guess = super().start()
        with torch.no_grad():
            last = apply_cell(self.cell, self.x[-1], [torch.zeros_like(part) for part in self.first])
        if len(self.x) > 1:
            check_batched_states(last, [part[-1] for part in guess], self.recurrence.cell_path, wait=True)
        return guess

    def step(self, guess: Guess) -> tuple[Guess, Guess, Blocks | None]:
        """Return the guess h, f(h) and K for all parts of the state."""
        before = self.before(guess)

        def run(steps: slice) -> tuple[Guess, Blocks]:
            with torch.enable_grad():
                given = [part[steps].detach().requires_grad_() for part in before]
                after = self.cell.advance(self.fed[steps], given)
            return [part.detach() for part in after], unit_blocks(after, given)

        found, blocks = _in_chunks(run, before[0])
        return guess, found, clamped(blocks)


def _in_chunks(run: Callable[[slice], tuple[Guess, Blocks]], like: Tensor) -> tuple[Guess, Blocks]:
    """Return the result of ``run`` for all steps, in chunks that fit the caches."""
    most = max(1, costs_of(like.device).chunk_numbers // like[0].numel())
    found = [run(slice(start, start + most)) for start in range(0, len(like), most)]
    if len(found) == 1:
        return found[0]
    states, blocks = zip(*found, strict=True)
    rows = [
        [None if chunks[0] is None else torch.cat(chunks) for chunks in zip(*row, strict=True)]
        for row in zip(*blocks, strict=True)
    ]
    return [torch.cat(part) for part in zip(*states, strict=True)], rows
