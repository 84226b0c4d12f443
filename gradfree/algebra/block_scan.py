"""The linear recurrence of states with several parts, separate for each unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradfree.algebra.time_scan import CHUNK, scan

Blocks = Sequence[Sequence[Tensor | None]]
"""K unit by unit: block (i, j) is the derivative of part i by part j of the previous state, (T, B, H) or ``None``."""


def clamped(blocks: Blocks) -> Blocks:
    """Return the blocks clamped to [-1, 1], so that an approximation of F does not grow from step to step."""
    return [[None if k is None else k.clamp(-1, 1) for k in row] for row in blocks]


def block_scan(terms: Sequence[Tensor], blocks: Blocks, reverse: bool = False) -> list[Tensor]:
    """Solve y_t,i = terms_t,i + Σ_j blocks_t,ij ⊙ y_{t-1},j; with ``reverse``, with blocks_{t+1} and y_{t+1}.

    Args:
        terms: the parts, (T, B, H) each.
        blocks: K; the blocks of the first link are not used.
        reverse: whether to run from the last step to the first.

    Returns:
        y, in the terms' dtype; sums are in single precision at least.
    """
    if len(terms) == 1:
        factor = blocks[0][0]
        return [terms[0] if factor is None else scan(terms[0], factor, reverse)]
    dtype = torch.promote_types(terms[0].dtype, torch.float32)
    zero = torch.zeros_like(terms[0])
    rows = [torch.stack([zero if factor is None else factor for factor in row], 1) for row in blocks]
    x, f = torch.stack(list(terms), 1).to(dtype), torch.stack(rows, 1).to(dtype)
    if not reverse:
        return list(_solve(x, f).to(terms[0].dtype).unbind(1))
    # The block that is rolled to the first position is not used.
    return list(_solve(x.flip(0), f.roll(-1, 0).flip(0)).flip(0).to(terms[0].dtype).unbind(1))


def _solve(x: Tensor, f: Tensor) -> Tensor:
    """Return y_t = x_t + f_t y_{t-1} for ``x`` (T, n, ...) and ``f`` (T, n, n, ...), in chunks as in ``scan``."""
    y, carried = torch.empty_like(x), torch.zeros_like(x[0])
    whole = len(x) - len(x) % CHUNK if len(x) >= 2 * CHUNK else 0
    if whole:
        xs, fs, ys = (part[:whole].unflatten(0, (-1, CHUNK)).unbind(1) for part in (x, f, y))
        ends, reach = xs[0], fs[0]
        for term, factor in zip(xs[1:], fs[1:], strict=True):
            ends = term + _times(factor, ends)
            reach = (factor.unsqueeze(3) * reach.unsqueeze(1)).sum(2)
        carried = torch.cat([torch.zeros_like(ends[:1]), _solve(ends, reach)[:-1]])
        for term, factor, out in zip(xs, fs, ys, strict=True):
            carried = torch.add(term, _times(factor, carried), out=out)
        carried = carried[-1]
    for term, factor, out in zip(x[whole:], f[whole:], y[whole:], strict=True):
        carried = torch.add(term, (factor * carried.unsqueeze(0)).sum(1), out=out)
    return y


def _times(factor: Tensor, state: Tensor) -> Tensor:
    return (factor * state.unsqueeze(1)).sum(2)
