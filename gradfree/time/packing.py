"""Where the rows of packed sequences lie."""

from __future__ import annotations

import torch
from torch import Tensor


class Packing:
    """Where the rows of packed sequences lie in a padded (T, B) grid."""

    def __init__(self, batch_sizes: Tensor, device: torch.device):
        self.batch_sizes = batch_sizes
        steps, batch = len(batch_sizes), int(batch_sizes[0])
        inside = torch.arange(batch) < batch_sizes.unsqueeze(1)
        lengths = inside.sum(0)
        number = inside.cumsum(1) - 1 + (batch_sizes.cumsum(0) - batch_sizes).unsqueeze(1)
        mirrored = (lengths - 1 - torch.arange(steps).unsqueeze(1)).clamp(min=0)
        self.shape = (steps, batch)
        self.inside = inside.unsqueeze(-1).to(device)
        self.rows = inside.flatten().nonzero().squeeze(1).to(device)
        self.last = ((lengths - 1) * batch + torch.arange(batch)).to(device)
        self.mirror = number.gather(0, mirrored)[inside].to(device)

    def pad(self, data: Tensor) -> Tensor:
        """Return packed rows (N, ·) as (T, B, ·), zeros behind each sequence."""
        padded = data.new_zeros(self.shape[0] * self.shape[1], data.shape[1])
        return padded.index_copy_(0, self.rows, data).unflatten(0, self.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """Return (T, B, ·) as packed rows (N, ·)."""
        return padded.flatten(0, 1).index_select(0, self.rows)
