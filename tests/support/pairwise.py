"""Covers of all pairs of values, in place of full products: most faults need two settings to show, hardly one three."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, Any, int, Any]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which every two values of any two axes meet at least once."""
    return pytest.mark.parametrize(tuple(axes), cover(product(*axes.values())))


def cover(rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return some of ``rows`` in which every two values meet that meet in any: always the same, by greed."""
    found = {tuple(row): pairs(row) for row in rows}
    wanted = set().union(*found.values())
    # A row's gain only ever falls: who still has the greatest when looked at again is the best.
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
    """Return every two values of a row, with their places."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}
