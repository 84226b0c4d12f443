"""What the ranks of a forward-only pipeline send each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gradfree.errors import ChainError
from gradfree.layers.chain import normalised
from gradfree.ranks.messages import Halt, Messages

_STATE, _SHIFT, _ERROR, _ROWS = range(100, 108, 2)
"""Kinds of messages: a note of shapes, and one more for the tensors."""


class Neighbours:
    """The ranks beside one; for engines the :class:`~gradfree.chains.line.Onward` of its second passes.

    Args:
        messages: the ranks.
        device: where this rank's tensors are.

    Attributes:
        number: of the microbatch that passes, counted on over all steps.
        feedback: F as a matrix, (classes, ...), on the first rank, for this step.
    """

    def __init__(self, messages: Messages, device: torch.device):
        self.messages, self._device = messages, device
        self.position, self.count = messages.position, messages.count
        self.number = 0
        self.feedback: Tensor | None = None
        self._given: set[tuple[int, int]] = set()

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank."""
        return self.position == self.count - 1

    def begin(self, number: int) -> None:
        """Begin a step, or a pass for outputs, with microbatch ``number``."""
        self.number = number
        self._given.clear()

    def give_up(self, halt: Halt, numbers: range) -> None:
        """Let all ranks that wait for something from this one know at once what has stopped it.

        Args:
            halt: in place of what it has not sent.
            numbers: of the microbatches that they may wait for.
        """
        receivers = {_STATE: self.position + 1, _SHIFT: self.position + 1, _ROWS: self.position - 1}
        if self.is_last:
            receivers = {_ERROR: 0, _ROWS: self.position - 1}
        # That a connection may be lost, too, is no news then.
        with suppress(ChainError):
            for number in numbers:
                for kind, to in receivers.items():
                    if to >= 0 and (kind, number) not in self._given:
                        self.messages.send_note(halt, to, number, kind, "what has stopped it")

    def state_entering(self) -> Tensor:
        """Return the state that the rank on the left has come to in the first pass."""
        (state,) = self._take(self.position - 1, _STATE, "a state of the first pass")
        return state

    def state_leaving(self, state: Tensor) -> None:
        """Send the rank on the right what this one has come to."""
        self._give([state], self.position + 1, _STATE, "a state of the first pass")

    def error(self, error: Tensor) -> None:
        """Send the first rank the error at the end of the chain, (N, classes), which the last one has."""
        self._give(normalised(error), 0, _ERROR, "an error")

    def rows_entering(self) -> Tensor:
        """Return what the transposed weights of all ranks on the right make of each class, (classes, ...)."""
        (rows,) = self._take(self.position + 1, _ROWS, "the transposed weights")
        return rows

    def rows_leaving(self, rows: Tensor) -> None:
        """Send the rank on the left the same with this one's weights; the first one keeps it."""
        if self.position == 0:
            self.feedback = rows
        else:
            self._give([rows], self.position - 1, _ROWS, "the transposed weights")

    def entering(self) -> tuple[Tensor, Tensor]:
        """Return by how much less the second pass enters, and the errors' norms."""
        if self.position:
            shift, norms = self._take(self.position - 1, _SHIFT, "a second pass")
            return shift, norms
        error, norms = self._take(self.count - 1, _ERROR, "an error")
        assert self.feedback is not None
        return torch.einsum("nc,c...->n...", error, self.feedback), norms

    def leaving(self, shift: Tensor, norms: Tensor) -> None:
        """Send the rank on the right by how much less the second pass leaves, and the norms."""
        self._give([shift, norms], self.position + 1, _SHIFT, "a second pass")

    def _give(self, tensors: Sequence[Tensor], to: int, kind: int, what: str) -> None:
        note = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        self._given.add((kind, self.number))
        self.messages.send_note(note, to, self.number, kind, what)
        for tensor in tensors:
            self.messages.send(tensor, to, self.number, kind + 1, what)

    def _take(self, source: int, kind: int, what: str) -> list[Tensor]:
        note = self.messages.receive_note(source, self.number, kind, what)
        empty = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in note]
        return [self.messages.receive(tensor, source, self.number, kind + 1, what) for tensor in empty]
