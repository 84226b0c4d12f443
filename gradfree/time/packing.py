"""Conversion between packed sequences and a padded grid."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfree.devices.hardware import to_device


class Packing:
    """The positions of the rows of packed sequences in a padded (T, B) grid.

    Attributes:
        batch_sizes: as in ``PackedSequence``.
        shape: (T, B).
        valid: mask of the steps that are not padding, (T, B, 1).
        rows: flat positions of the packed rows, (N,).
        last: flat position of each sequence's last step, (B,).
        mirror: for each packed row, the row of the same sequence when it runs backwards, (N,).
    """

    def __init__(self, batch_sizes: Tensor, device: torch.device):
        self.batch_sizes = batch_sizes
        steps, batch = len(batch_sizes), int(batch_sizes[0])
        # On the CPU, as the sizes are, regardless of torch.set_default_device.
        samples, step = (torch.arange(n, device=batch_sizes.device) for n in (batch, steps))
        valid = samples < batch_sizes.unsqueeze(1)
        lengths = valid.sum(0)
        number = valid.cumsum(1) - 1 + (batch_sizes.cumsum(0) - batch_sizes).unsqueeze(1)
        mirrored = (lengths - 1 - step.unsqueeze(1)).clamp(min=0)
        self.shape = (steps, batch)
        self.valid = to_device(valid.unsqueeze(-1), device)
        self.rows = to_device(valid.flatten().nonzero().squeeze(1), device)
        self.last = to_device((lengths - 1) * batch + samples, device)
        self.mirror = to_device(number.gather(0, mirrored)[valid], device)

    def pad(self, data: Tensor) -> Tensor:
        """Return packed rows (N, ·) as (T, B, ·), padded with zeros."""
        padded = data.new_zeros(self.shape[0] * self.shape[1], data.shape[1])
        return padded.index_copy_(0, self.rows, data).unflatten(0, self.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """Return (T, B, ·) as packed rows (N, ·)."""
        return padded.flatten(0, 1).index_select(0, self.rows)
