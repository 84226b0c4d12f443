"""The other ranks of a forward-only pipeline, as one of them sees them in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfree.layers.layer_chain import normalised
from gradfree.ranks.messages import ERROR, ROWS, SHIFT, STATE, Neighbours


class ForwardNeighbours(Neighbours):
    """Gives states, errors and transposed weights; for engines the :class:`~gradfree.chains.line.Onward`.

    ``number`` is that of the microbatch, counted on over all steps.

    Attributes:
        feedback: F as a matrix, (classes, ...), on the first rank, for this step.
    """

    feedback: Tensor | None = None

    def state_entering(self) -> Tensor:
        """Return the state that the rank on the left has come to in the first pass."""
        (state,), _ = self.take(self.position - 1, STATE, "a state of the first pass")
        return state

    def state_leaving(self, state: Tensor) -> None:
        """Send the rank on the right what this one has come to."""
        self.give([state], self.position + 1, STATE, "a state of the first pass")

    def error(self, error: Tensor) -> None:
        """Send the first rank the error at the end of the chain, (N, classes), which the last one has."""
        self.give(normalised(error), 0, ERROR, "an error")

    def rows_entering(self) -> Tensor:
        """Return what the transposed weights of all ranks on the right make of each class, (classes, ...)."""
        (rows,), _ = self.take(self.position + 1, ROWS, "the transposed weights")
        return rows

    def rows_leaving(self, rows: Tensor) -> None:
        """Send the rank on the left the same with this one's weights; the first one keeps it."""
        if self.position == 0:
            self.feedback = rows
        else:
            self.give([rows], self.position - 1, ROWS, "the transposed weights")

    def entering(self) -> tuple[Tensor, Tensor]:
        """Return by how much less the second pass enters, and the errors' norms."""
        if self.position:
            (shift, norms), _ = self.take(self.position - 1, SHIFT, "a second pass")
            return shift, norms
        (error, norms), _ = self.take(self.count - 1, ERROR, "an error")
        assert self.feedback is not None
        return torch.einsum("nc,c...->n...", error, self.feedback), norms

    def leaving(self, shift: Tensor, norms: Tensor) -> None:
        """Send the rank on the right by how much less the second pass leaves, and the norms."""
        self.give([shift, norms], self.position + 1, SHIFT, "a second pass")
