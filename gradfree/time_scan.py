"""The linear recurrence over a whole sequence at once, in O(√T) vectorised steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def scan(terms: Tensor, factors: Tensor, reverse: bool = False) -> Tensor:
    """Solve y_t = terms_t + factors_t ⊙ y_{t-1}; with ``reverse``, y_t = terms_t + factors_{t+1} ⊙ y_{t+1}.

    Either way factors_t belongs to the link between steps t-1 and t, and the first one multiplies nothing.

    Two levels: the sequence is cut into chunks of about √T, all chunks run at once, a second recurrence carries
    their ends across, and one pass adds what is carried in. Memory-bound: it reads and writes its operands about
    three times.

    Args:
        terms: (T, ...), any floating dtype.
        factors: of one step each, (T, ...) as ``terms``; or constant, shaped to broadcast to ``terms[0]``.
        reverse: whether to run from the last step to the first.

    Returns:
        y, (T, ...), contiguous.
    """
    length = terms.shape[0]
    if length < 2 or terms.numel() == 0:
        return terms.clone()
    size = 2 ** round(math.log2(length) / 2)
    count = -(-length // size)
    chunks = _chunks(terms, count, size)
    y = torch.empty_like(chunks)
    if factors.dim() < terms.dim():
        inside = [factors] * size
        powers = factors ** torch.arange(1, size + 1, device=terms.device).view(-1, *[1] * (terms.dim() - 1))
        reach = (powers.flip(0) if reverse else powers).unsqueeze(0)
    else:
        links = _chunks(factors, count, size)
        inside = list(links.unbind(1))
        reach = _reach(links, reverse)
    steps = list(y.unbind(1))
    _inside_chunks(chunks.unbind(1), inside, steps, reverse)
    end = 0 if reverse else size - 1
    carried = _across_chunks(steps[end], reach[:, end].expand_as(steps[end]), reverse)
    return y.addcmul_(carried.unsqueeze(1), reach).flatten(0, 1)[:length]


def _chunks(x: Tensor, count: int, size: int) -> Tensor:
    """Return ``x`` as (count, size, ...), padded with zeros behind."""
    padding = count * size - x.shape[0]
    if padding:
        x = F.pad(x, [0, 0] * (x.dim() - 1) + [0, padding])
    return x.unflatten(0, (count, size))


def _reach(links: Tensor, reverse: bool) -> Tensor:
    """Return the factor from each step of a chunk to the value that enters the chunk."""
    reach = torch.empty_like(links)
    steps, inside = reach.unbind(1), links.unbind(1)
    if reverse:
        steps[-1].copy_(inside[0].roll(-1, 0))
        for i in range(len(steps) - 2, -1, -1):
            torch.mul(steps[i + 1], inside[i + 1], out=steps[i])
    else:
        steps[0].copy_(inside[0])
        for i in range(1, len(steps)):
            torch.mul(steps[i - 1], inside[i], out=steps[i])
    return reach


def _inside_chunks(terms: Sequence[Tensor], factors: Sequence[Tensor], y: Sequence[Tensor], reverse: bool) -> None:
    """Run all chunks as if nothing entered them."""
    if reverse:
        y[-1].copy_(terms[-1])
        for i in range(len(y) - 2, -1, -1):
            torch.addcmul(terms[i], y[i + 1], factors[i + 1], out=y[i])
    else:
        y[0].copy_(terms[0])
        for i in range(1, len(y)):
            torch.addcmul(terms[i], y[i - 1], factors[i], out=y[i])


def _across_chunks(ends: Tensor, reach: Tensor, reverse: bool) -> Tensor:
    """Return the value that enters each chunk."""
    carried = torch.zeros_like(ends)
    order = range(len(ends) - 1, -1, -1) if reverse else range(len(ends))
    for before, n in pairwise(order):
        torch.addcmul(ends[before], carried[before], reach[before], out=carried[n])
    return carried
