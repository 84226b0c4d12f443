"""Random changes of training images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_MARGIN = 4


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images (B, C, H, W) moved by up to four pixels, zeros outside, and mirrored half of the time.

    As is usual for CIFAR-10 since Lin et al. 2014 (arXiv 1409.5185).
    """
    count, _, height, width = images.shape
    padded = pad(images, (_MARGIN,) * 4)
    tops, lefts = torch.randint(2 * _MARGIN + 1, (2, count), generator=generator)
    rows = tops[:, None] + torch.arange(height)
    columns = lefts[:, None] + torch.arange(width)
    mirrored = torch.rand(count, generator=generator) < 0.5
    columns[mirrored] = columns[mirrored].flip(1)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
