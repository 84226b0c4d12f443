"""Pairwise test parameters instead of full products: most faults show with a combination of two settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, Any, int, Any]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by rows that contain every pair of values of any two axes."""
    return pytest.mark.parametrize(tuple(axes), cover(product(*axes.values())))


def cover(rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return a subset of ``rows`` that contains all their pairs of values, by a deterministic greedy algorithm."""
    numbers: dict[Pair, int] = {}
    # Bits of an integer are faster than sets.
    found = {row: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(row)) for row in map(tuple, rows)}
    wanted = (1 << len(numbers)) - 1
    # A row's gain never rises: if the recomputed gain of the first row is unchanged, it is the maximum.
    gains = [(-gain.bit_count(), n, row) for n, (row, gain) in enumerate(found.items())]
    heapify(gains)
    chosen = []
    while wanted:
        _, n, row = gains[0]
        gain = -(found[row] & wanted).bit_count()
        if gain == gains[0][0]:
            heappop(gains)
            wanted &= ~found[row]
            chosen.append(row)
        else:
            heapreplace(gains, (gain, n, row))
    return chosen


def pairs(row: Sequence[Any]) -> set[Pair]:
    """Return all pairs of values of a row, with their positions."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}
