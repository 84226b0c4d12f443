"""Ways to solve y_t = terms_t + factors_{t+1} ⊙ y_{t+1}; arguments as those of :func:`.time_scan.scan`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradfree.algebra.time_scan import scan


def copy(terms: Tensor, factors: Tensor) -> Tensor:
    """Read and write what any method must; the measure of all others."""
    return torch.empty_like(terms).copy_(terms)


def ours(terms: Tensor, factors: Tensor) -> Tensor:
    """Run what the engines run."""
    return scan(terms, factors, reverse=True)


def loop(terms: Tensor, factors: Tensor) -> Tensor:
    """Go step by step, without allocation."""
    y = torch.empty_like(terms)
    xs, links, ys = terms.unbind(), factors.expand_as(terms).unbind(), y.unbind()
    ys[-1].copy_(xs[-1])
    for t in range(len(xs) - 2, -1, -1):
        torch.addcmul(xs[t], ys[t + 1], links[t + 1], out=ys[t])
    return y


def doubling(terms: Tensor, factors: Tensor) -> Tensor:
    """Add to each step what lies 1, 2, 4, ... steps ahead (Hillis and Steele, CACM 29, 1986)."""
    constant = factors.dim() < terms.dim()
    y, reach, ahead = terms, factors if constant else factors.roll(-1, 0), 1
    while ahead < len(terms):
        y = torch.cat([torch.addcmul(y[:-ahead], y[ahead:], reach if constant else reach[:-ahead]), y[-ahead:]])
        reach = reach * reach if constant else torch.cat([reach[:-ahead] * reach[ahead:], reach[-ahead:]])
        ahead *= 2
    return y


def associative(terms: Tensor, factors: Tensor) -> Tensor:
    """Use torch's own associative scan, a prototype.

    Raises:
        Exception: whatever it raises in versions of torch that have none, or where it does not work.
    """
    from torch._higher_order_ops.associative_scan import associative_scan

    links = factors.expand_as(terms).roll(-1, 0)
    return associative_scan(_compose, (links, terms), 0, reverse=True, combine_mode="generic")[1]


def _compose(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return first[0] * second[0], first[1] * second[0] + second[1]


def fft(terms: Tensor, factors: Tensor) -> Tensor:
    """Correlate with the powers of a constant factor, in frequencies."""
    length = len(terms)
    steps = torch.arange(length, device=terms.device).view(-1, *[1] * (terms.dim() - 1))
    kernel = torch.fft.rfft(factors**steps, 2 * length, 0)
    return torch.fft.irfft(torch.fft.rfft(terms, 2 * length, 0) * kernel.conj(), 2 * length, 0)[:length]


ANY_FACTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": copy,
    "gradfree": ours,
    "loop": loop,
    "doubling": doubling,
    "associative_scan": associative,
}
CONSTANT_FACTORS = ANY_FACTORS | {"FFT": fft}
