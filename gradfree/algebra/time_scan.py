"""The scan: a linear recurrence over a sequence, by one kernel on a GPU, in O(log T) vectorised steps elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Factor, is_number
from gradfree.devices.costs import costs_of
from gradfree.devices.hardware import runs_triton

# Steps in a chunk. Shorter chunks need more levels, longer ones more operations in each level.
CHUNK = 16


def scan(terms: Tensor, factors: Tensor, reverse: bool = False) -> Tensor:
    """Solve y_t = terms_t + factors_t ⊙ y_{t-1}; with ``reverse``, y_t = terms_t + factors_{t+1} ⊙ y_{t+1}.

    In both directions factors_t belongs to the link between steps t-1 and t, and the first one is not used.

    On a GPU with Triton, this is one kernel. Elsewhere the sequence is cut into chunks. First all chunks run at once
    from zero, and only their ends are kept. The ends form a shorter sequence, which is solved by the same method. Then
    all chunks run again from their true starts. So a long sequence is read twice and written once, by some 30
    operations for each factor of 16 in T. Sequences with wide steps run step by step.

    Args:
        terms: (T, ...), any floating dtype.
        factors: one for each step, (T, ...) as ``terms``; or constant, shaped to broadcast to ``terms[0]``.
        reverse: whether to run from the last step to the first.

    Returns:
        y, (T, ...), contiguous and of the terms' dtype; sums are in single precision at least.
    """
    if runs_triton(terms.device) and terms.numel() and (kernel := _kernel(terms.device)):
        return kernel(terms, factors, reverse)
    wide = torch.promote_types(torch.promote_types(terms.dtype, factors.dtype), torch.float32)
    if wide != terms.dtype or wide != factors.dtype:
        return scan(terms.to(wide), factors.to(wide), reverse).to(terms.dtype)
    y = torch.empty_like(terms, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    if factors.dim() < terms.dim():
        # A contiguous row, laid out as a step is.
        factors = factors.expand_as(terms[0]).contiguous()
    _solve(terms, factors.expand_as(terms), y, reverse)
    return y


def scan_along(terms: Tensor, factor: Factor) -> Tensor:
    """Solve δ_t = terms_t + δ_{t+1} K_{t+1}, with K the same number or tensor for all links, or one for each."""
    if is_number(factor, 0.0):
        return terms
    if not isinstance(factor, Tensor):
        factor = torch.full((), factor, dtype=torch.promote_types(terms.dtype, torch.float32), device=terms.device)
    return scan(terms, factor, reverse=True)


@cache
def _kernel(device: torch.device) -> Callable[[Tensor, Tensor, bool], Tensor] | None:
    """Return the scan as one Triton kernel; ``None`` if Triton is missing or cannot compile it for ``device``."""
    try:
        from gradfree.algebra import triton_scan
    except ImportError:
        return None
    try:
        triton_scan.scan(torch.ones(2, 1, device=device), torch.ones(1, device=device), False)
    except Exception as error:
        warnings.warn(
            f"Triton cannot compile the scan for {device}; gradfree uses slower torch operations: {error}", stacklevel=2
        )
        return None
    return triton_scan.scan


def _solve(terms: Tensor, factors: Tensor, y: Tensor, reverse: bool) -> None:
    """Fill ``y``: whole chunks at once, then the remaining steps one by one."""
    length = len(terms)
    # An operation on wide steps takes longer than its start: then step by step is fastest, as it reads all once.
    one_by_one = length < 2 * CHUNK or terms[0].numel() >= costs_of(terms.device).scan_numbers
    whole = 1 if one_by_one else length - length % CHUNK
    left = length - whole
    chunks, rest = (slice(left, None), slice(left + 1)) if reverse else (slice(whole), slice(whole - 1, None))
    if whole > 1:
        _solve_chunks(terms[chunks], factors[chunks], y[chunks], reverse)
    else:
        y[chunks] = terms[chunks]
    if left:
        _run(terms[rest].unbind(), factors[rest].unbind(), y[rest].unbind(), reverse)


def _solve_chunks(terms: Tensor, factors: Tensor, y: Tensor, reverse: bool) -> None:
    """Fill ``y``, of a whole number of chunks."""
    xs, fs, ys = (x.unflatten(0, (-1, CHUNK)).unbind(1) for x in (terms, factors, y))
    first = -1 if reverse else 0
    ends = xs[first].clone()
    _run(xs, fs, [ends] * CHUNK, reverse)
    carried = torch.empty_like(ends)
    _solve(ends, _link_products(fs, reverse), carried, reverse)
    leaving, entering = (slice(1, None), slice(-1)) if reverse else (slice(-1), slice(1, None))
    ys[first][first] = xs[first][first]
    torch.addcmul(xs[first][entering], carried[leaving], fs[0][1:], out=ys[first][entering])
    _run(xs, fs, ys, reverse)


def _run(terms: Sequence[Tensor], factors: Sequence[Tensor], y: Sequence[Tensor], reverse: bool) -> None:
    """Fill ``y`` step by step from its first entry in running order, which is given."""
    order = slice(None, None, -1 if reverse else 1)
    for x, factor, before, after in zip(terms[order][1:], factors[1:][order], y[order], y[order][1:], strict=False):
        torch.addcmul(x, before, factor, out=after)


def _link_products(factors: Sequence[Tensor], reverse: bool) -> Tensor:
    """Return the factors from each chunk's end to the next chunk's end: the products over the links between."""
    across, second, *others = factors
    if across.stride(0) == 0:
        return (across[:1] ** CHUNK).expand_as(across)
    inside = second.clone()
    for factor in others:
        inside *= factor
    reach = across.clone()
    reach[1:] *= inside[:-1] if reverse else inside[1:]
    return reach
