"""Conversion between packed sequences and a padded grid."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradfree.devices.hardware import to_device


class Packing:
    """The positions of the rows of packed sequences in a padded (T, B) grid.

    Attributes:
        batch_sizes: as in ``PackedSequence``.
        shape: (T, B).
        valid: mask of the steps that are not padding, (T, B, 1).
        rows: flat positions of the packed rows, (N,).
        last: flat position of each sequence's last step, (B,).
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device):
        self.batch_sizes = batch_sizes
        steps, batch = len(batch_sizes), int(batch_sizes[0])
        # On the CPU, as the sizes are, regardless of torch.set_default_device.
        samples = torch.arange(batch, device=batch_sizes.device)
        valid = samples < batch_sizes.unsqueeze(1)
        self.shape = (steps, batch)
        self.valid = to_device(valid.unsqueeze(-1), device)
        self.rows = to_device(valid.flatten().nonzero().squeeze(1), device)
        self.last = to_device((valid.sum(0) - 1) * batch + samples, device)

    @cached_property
    def mirror(self) -> Tensor:
        """For each packed row, the row of the same sequence when it runs backwards, (N,)."""
        device = self.rows.device
        steps, samples = (torch.arange(size, device=device) for size in self.shape)
        starts = to_device(self.batch_sizes.cumsum(0) - self.batch_sizes, device)
        # Of each step of the grid; padding, whose step would be negative, is not among the rows.
        mirrored = self.valid.squeeze(-1).sum(0) - 1 - steps.unsqueeze(1)
        return (starts[mirrored] + samples).flatten()[self.rows]

    def pad(self, data: Tensor) -> Tensor:
        """Return packed rows (N, ·) as (T, B, ·), padded with zeros."""
        padded = data.new_zeros(self.shape[0] * self.shape[1], data.shape[1])
        return padded.index_copy_(0, self.rows, data).unflatten(0, self.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """Return (T, B, ·) as packed rows (N, ·)."""
        return padded.flatten(0, 1).index_select(0, self.rows)


class Padding:
    """The padding behind the sequences of a batch.

    Attributes:
        valid: mask of the steps that are not padding, (T, B, 1).
        ends: index of each sequence's last step, (B,).
    """

    def __init__(self, valid: Tensor):
        self.valid = valid
        self.ends = valid.squeeze(-1).sum(0) - 1
        self._samples = torch.arange(valid.shape[1], device=valid.device)

    def last_steps(self, out: Tensor) -> Tensor:
        """Return ``out`` (T, B, ...) at the last step of each sequence, (B, ...)."""
        return out[self.ends, self._samples]


class PackedRows:
    """A packed sequence as a padded batch (T, B, ...), whose padding repeats each sequence's last step.

    Args:
        given: the packed sequence.

    Attributes:
        padding: the padding.
    """

    def __init__(self, given: PackedSequence):
        self._given = given
        packing = Packing(given.batch_sizes, given.data.device)
        steps = torch.arange(packing.shape[0], device=packing.last.device).unsqueeze(1)
        samples = torch.arange(packing.shape[1], device=packing.last.device)
        # Of each step of the grid the packed row; of padding that of the sequence's last step.
        rows = torch.empty(packing.shape[0] * packing.shape[1], dtype=torch.int64, device=packing.rows.device)
        rows[packing.rows] = torch.arange(len(packing.rows), device=packing.rows.device)
        self._packing, self.padding = packing, Padding(packing.valid)
        self._source = rows[torch.minimum(steps, self.padding.ends) * packing.shape[1] + samples]

    def padded(self) -> Tensor:
        """Return the sequences, (T, B, ...), in the order in which they are packed."""
        return self._given.data.index_select(0, self._source.flatten()).unflatten(0, self._source.shape)

    def packed(self, out: Tensor) -> PackedSequence:
        """Return ``out`` (T, B, ...) packed as the given sequence."""
        given = self._given
        return PackedSequence(self._packing.pack(out), given.batch_sizes, given.sorted_indices, given.unsorted_indices)

    def sorted(self, state: Any) -> Any:
        """Return a state (B, ...) or a tuple of them in the order in which the sequences are packed."""
        return self._reordered(state, self._given.sorted_indices)

    def unsorted(self, state: Any) -> Any:
        """Return a state (B, ...) or a tuple of them in the user's order."""
        return self._reordered(state, self._given.unsorted_indices)

    def _reordered(self, state: Any, order: Tensor | None) -> Any:
        if state is None or order is None:
            return state
        if isinstance(state, tuple):
            return tuple(part.index_select(0, order) for part in state)
        return state.index_select(0, order)
