"""The reverse linear recurrence with dense links, solved in O(log L) steps by parallel cyclic reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfree.devices.hardware import without_tf32


def cyclic_reduction(terms: Tensor, links: Tensor) -> Tensor:
    """Solve y_i = terms_i + y_{i+1} links_i for all i at once, row vectors times matrices.

    Each of ceil(log2 L) rounds doubles the number of links whose product a matrix holds. After the round of stride s,
    y_i includes terms i to i + 2s - 1, and matrix i leads from i + 2s to i (DeepPCR, arXiv 2309.16318).

    Args:
        terms: (L, B, H), single or double precision.
        links: (L - 1, B, H, H), of the same precision; links_i leads from i + 1 to i.

    Returns:
        y, (L, B, H); matrices are multiplied in full precision, without TF32.
    """
    y, stride = terms.clone(), 1
    with without_tf32(), torch.autocast(terms.device.type, enabled=False):
        while stride < len(y):
            y[:-stride] += (y[stride:].unsqueeze(-2) @ links).squeeze(-2)
            links = links[stride:] @ links[:-stride] if len(links) > stride else links
            stride *= 2
    return y
