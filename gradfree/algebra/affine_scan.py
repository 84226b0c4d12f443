"""The linear recurrence of short vectors with dense links."""

from __future__ import annotations

import torch
from torch import Tensor

from gradfree.algebra.time_scan import CHUNK, scan
from gradfree.devices.hardware import without_tf32


def affine_scan(terms: Tensor, links: Tensor, reverse: bool = False) -> Tensor:
    """Solve y_t = terms_t + links_t y_{t-1}; with ``reverse``, y_t = terms_t + y_{t+1} links_{t+1}.

    The first link is not used. Whole chunks of 16 steps run at once, as in :func:`~gradfree.algebra.time_scan.scan`.

    Args:
        terms: (T, R, n), any floating dtype.
        links: (T, R, n, n), of the same dtype.
        reverse: whether to run from the last step to the first; y are row vectors then.

    Returns:
        y, (T, R, n); sums are in single precision at least, and products in full precision, without TF32.
    """
    if terms.shape[-1] == 1:
        return scan(terms.squeeze(-1), links[..., 0, 0], reverse).unsqueeze(-1)
    wide = torch.promote_types(terms.dtype, torch.float32)
    x, f = terms.to(wide), links.to(wide)
    if reverse:
        # The link that is rolled to the first position is not used.
        x, f = x.flip(0), f.roll(-1, 0).flip(0).mT
    with without_tf32(), torch.autocast(terms.device.type, enabled=False):
        y = _solve(x.unsqueeze(-1), f).squeeze(-1)
    return (y.flip(0) if reverse else y).to(terms.dtype)


def _solve(x: Tensor, f: Tensor) -> Tensor:
    """Return y_t = x_t + f_t y_{t-1} for ``x`` (T, R, n, 1) and ``f`` (T, R, n, n)."""
    pieces, carried = [], torch.zeros_like(x[0])
    whole = len(x) - len(x) % CHUNK if len(x) >= 2 * CHUNK else 0
    if whole:
        xs, fs = (part[:whole].unflatten(0, (-1, CHUNK)).transpose(0, 1).contiguous().unbind() for part in (x, f))
        ends, reach = xs[0], fs[0]
        for term, link in zip(xs[1:], fs[1:], strict=True):
            ends, reach = term + link @ ends, link @ reach
        carried = torch.cat([torch.zeros_like(ends[:1]), _solve(ends, reach)[:-1]])
        of_steps = []
        for term, link in zip(xs, fs, strict=True):
            carried = term + link @ carried
            of_steps.append(carried)
        pieces.append(torch.stack(of_steps, 1).flatten(0, 1))
        carried = carried[-1]
    for term, link in zip(x[whole:], f[whole:], strict=True):
        carried = term + link @ carried
        pieces.append(carried.unsqueeze(0))
    return torch.cat(pieces)
