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
    found = {tuple(row): pairs(row) for row in rows}
    wanted = set().union(*found.values())
    # A row's gain never rises: if the recomputed gain of the first row is unchanged, it is the maximum.
    gains = [(-len(gain), n, row) for n, (row, gain) in enumerate(found.items())]
    heapify(gains)
    chosen = []
    while wanted:
        _, n, row = gains[0]
        gain = -len(found[row] & wanted)
        if gain == gains[0][0]:
            heappop(gains)
            wanted -= found[row]
            chosen.append(row)
        else:
            heapreplace(gains, (gain, n, row))
    return chosen


def pairs(row: Sequence[Any]) -> set[Pair]:
    """Return all pairs of values of a row, with their positions."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}
