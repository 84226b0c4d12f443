"""The scan as one Triton kernel: step by step, all sequences and units in parallel.

Imported only when it is used: Triton comes only with torch's GPU builds, and is slow to import.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns of one program, which is one warp. Two elements for each thread allow prefetching of 16-bit numbers.
_BLOCK = 64


def scan(terms: Tensor, factors: Tensor, reverse: bool) -> Tensor:
    """Solve the recurrence; arguments and result as in :func:`.time_scan.scan`; ``terms`` must not be empty.

    Reads and writes everything once. Sums are in float32, or in float64 if ``terms`` are.
    """
    steps, width = len(terms), terms[0].numel()
    terms, y = terms.contiguous(), torch.empty_like(terms, memory_format=torch.contiguous_format)
    first, stride = ((steps - 1) * width, -width) if reverse else (0, width)
    if factors.dim() < terms.dim():
        factors, link, link_stride = factors.expand_as(terms[0]), 0, 0
    else:
        # A link's factor has the index of its later step; in reverse order that is the step before.
        link, link_stride = first if reverse else width, stride
    accumulator = tl.float64 if terms.dtype == torch.float64 else tl.float32
    with torch.cuda.device_of(terms):
        _kernel[triton.cdiv(width, _BLOCK),](
            terms,
            factors.contiguous(),
            y,
            steps,
            width,
            first,
            stride,
            link,
            link_stride,
            ACCUMULATOR=accumulator,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return y


# No type annotations: Triton parses them and supports only some.
@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    terms, factors, y, steps, width, first, stride, link, link_stride, ACCUMULATOR: tl.constexpr, BLOCK: tl.constexpr
):
    """Run a block of columns through all steps; offsets and strides count elements."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    terms += first + columns
    y += first + columns
    factors += link + columns
    carried = tl.load(terms, mask=inside).to(ACCUMULATOR)
    tl.store(y, carried, mask=inside)
    # Stages: later steps are loaded while this one is computed.
    for _ in tl.range(1, steps, num_stages=8):
        terms += stride
        y += stride
        factor = tl.load(factors, mask=inside).to(ACCUMULATOR)
        carried = tl.load(terms, mask=inside).to(ACCUMULATOR) + factor * carried
        tl.store(y, carried, mask=inside)
        factors += link_stride
