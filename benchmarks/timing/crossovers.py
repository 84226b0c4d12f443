"""What is faster from which size on, and by how much: comparisons for ``benchmarks/scripts/costs.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from gradfree.devices import costs
from gradfree.devices.costs import UNLIMITED, costs_of
from gradfree.devices.hardware import mark, seconds

Run = Callable[[], object]


class Bench(NamedTuple):
    """Where and how long to measure.

    Attributes:
        device: where.
        seconds: for each pass of a comparison, at least.
        small: whether to try two sizes only.
    """

    device: torch.device
    seconds: float
    small: bool = False

    def times(self, *runs: Run) -> list[float]:
        """Return the least seconds of each run, in turns."""
        for run in runs:
            run()
        found: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + self.seconds * len(runs)
        while not found[0] or (time.perf_counter() < end and len(found[0]) < 200):
            for run, own in zip(runs, found, strict=True):
                start = mark(self.device)
                run()
                own.append(seconds(start, mark(self.device)))
        return list(map(min, found))

    def ratio(self, first: Run, second: Run) -> float:
        """Return the time of the first run as a multiple of the second one's."""
        one, other = self.times(first, second)
        return one / other

    def of(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the sizes to try."""
        return [sizes[0], sizes[len(sizes) // 2]] if self.small else sizes

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a random input that needs a gradient."""
        return torch.randn(*shape, device=self.device, dtype=dtype).requires_grad_()


def powers(low: int, high: int) -> list[int]:
    """Return the powers of two between those with two exponents."""
    return [2**n for n in range(low, high + 1)]


def within(bench: Bench, name: str, value: float, run: Run) -> Run:
    """Return ``run`` with another value of a number."""
    table = costs.TABLES
    if not hasattr(costs, name):
        table = {bench.device.type: replace(costs_of(bench.device), **dict[str, Any]({name: value}))}

    def changed() -> object:
        with patch.dict(costs.TABLES, table), patch.object(costs, name, value, create=name not in vars(costs)):
            return run()

    return changed


def crossover(sizes: Sequence[int], ratio: Callable[[int], float]) -> float:
    """Return from which size on ``ratio`` is above 1; the first or the last size if it always or never is."""
    found = [(size, log(ratio(size))) for size in sizes]
    for (low, below), (high, above) in pairwise(found):
        if below < 0 <= above:
            return low * exp(log(high / low) * below / (below - above))
    return sizes[0] if found[0][1] >= 0 else sizes[-1]


def bound(name: str, sizes: Sequence[int], make: Callable[[Bench, int], Run]) -> Callable[[Bench], float]:
    """Return what measures a bound: from there on, what runs without the bound is slower than with the bound 0."""

    def measure(bench: Bench) -> float:
        def ratio(size: int) -> float:
            run = make(bench, size)
            return bench.ratio(within(bench, name, UNLIMITED, run), within(bench, name, 0, run))

        return crossover(bench.of(sizes), ratio)

    return measure


def fastest(name: str, sizes: Sequence[int], make: Callable[[Bench], Run]) -> Callable[[Bench], float]:
    """Return what measures the fastest of some values."""

    def measure(bench: Bench) -> float:
        run, tried = make(bench), bench.of(sizes)
        taken = bench.times(*(within(bench, name, size, run) for size in tried))
        return tried[taken.index(min(taken))]

    return measure


def line(xs: Iterable[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return start and slope of the line through some times, by relative errors."""
    times = np.array(ys)
    columns = np.stack([np.ones(len(times)), np.array(list(xs), dtype=float)], 1)
    found, _ = nnls(columns / times[:, None], np.ones(len(times)))
    return float(found[0]), float(found[1])


def both_passes(module: nn.Module, x: Tensor, context: AbstractContextManager[Any] | None = None) -> Run:
    """Return what runs both passes of a recurrent layer."""
    given = [x, *module.parameters()]

    def run() -> object:
        with context or nullcontext():
            out = module(x)[0]
        return torch.autograd.grad(out.sum(), given)

    return run
