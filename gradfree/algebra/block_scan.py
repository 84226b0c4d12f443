"""The linear recurrence of states with several parts, separate for each unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradfree.algebra.time_scan import scan

Blocks = Sequence[Sequence[Tensor | None]]
"""K unit by unit: block (i, j) is the derivative of part i by part j of the previous state, (T, B, H) or ``None``."""

# As in :mod:`.time_scan`.
_CHUNK = 16


def transposed(blocks: Blocks) -> Blocks:
    """Return the transposed blocks, for cotangents, which are row vectors."""
    return list(zip(*blocks, strict=True))


def clamped(blocks: Blocks) -> Blocks:
    """Return the blocks clamped to [-1, 1], so that an approximation of F does not grow from step to step."""
    return [[None if k is None else k.clamp(-1, 1) for k in row] for row in blocks]


def block_scan(terms: Sequence[Tensor], blocks: Blocks, reverse: bool = False) -> list[Tensor]:
    """Solve y_t,i = terms_t,i + Σ_j blocks_t,ij ⊙ y_{t-1},j; with ``reverse``, with blocks_{t+1} and y_{t+1}.

    Parts that depend on no unsolved part are solved one by one, by :func:`~gradfree.algebra.time_scan.scan`.

    Args:
        terms: the parts, (T, B, H) each.
        blocks: K; the blocks of the first link are not used.
        reverse: whether to run from the last step to the first.

    Returns:
        y, in the terms' dtype; sums are in single precision at least.
    """
    found: dict[int, Tensor] = {}
    while len(found) < len(terms):
        unsolved = [i for i in range(len(terms)) if i not in found]
        independent = [i for i in unsolved if all(blocks[i][j] is None for j in unsolved if j != i)]
        whole = {i: _add_solved_parts(i, terms, blocks, found, reverse) for i in independent or unsolved}
        if independent:
            own = ((i, blocks[i][i]) for i in independent)
            found |= {i: whole[i] if factor is None else scan(whole[i], factor, reverse) for i, factor in own}
        else:
            found |= dict(
                zip(unsolved, _solve_coupled([whole[i] for i in unsolved], unsolved, blocks, reverse), strict=True)
            )
    return [found[i] for i in range(len(terms))]


def _add_solved_parts(
    i: int, terms: Sequence[Tensor], blocks: Blocks, found: dict[int, Tensor], reverse: bool
) -> Tensor:
    """Return the terms of part i plus the contributions of the solved parts ``found``."""
    term = terms[i]
    for j, y in found.items():
        factor = blocks[i][j]
        if factor is not None:
            term = term.clone() if term is terms[i] else term
            here, there = (slice(None, -1), slice(1, None)) if reverse else (slice(1, None), slice(None, -1))
            term[here] += factor[1:] * y[there]
    return term


def _solve_coupled(terms: Sequence[Tensor], parts: Sequence[int], blocks: Blocks, reverse: bool) -> Sequence[Tensor]:
    """Solve for parts that all depend on each other."""
    dtype = torch.promote_types(terms[0].dtype, torch.float32)
    zero = torch.zeros_like(terms[0])
    rows = [torch.stack([zero if (k := blocks[i][j]) is None else k for j in parts], 1) for i in parts]
    x, f = torch.stack(list(terms), 1).to(dtype), torch.stack(rows, 1).to(dtype)
    if not reverse:
        return _solve(x, f).to(terms[0].dtype).unbind(1)
    # The block that is rolled to the first position is not used.
    return _solve(x.flip(0), f.roll(-1, 0).flip(0)).flip(0).to(terms[0].dtype).unbind(1)


def _solve(x: Tensor, f: Tensor) -> Tensor:
    """Return y_t = x_t + f_t y_{t-1} for ``x`` (T, n, ...) and ``f`` (T, n, n, ...), in chunks as in ``scan``."""
    y, carried = torch.empty_like(x), torch.zeros_like(x[0])
    whole = len(x) - len(x) % _CHUNK if len(x) >= 2 * _CHUNK else 0
    if whole:
        xs, fs, ys = (part[:whole].unflatten(0, (-1, _CHUNK)).unbind(1) for part in (x, f, y))
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
