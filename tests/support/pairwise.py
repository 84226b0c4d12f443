"""Covers of all pairs of values, in place of full products: most faults need two settings to show, hardly one three."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, Any, int, Any]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which every two values of any two axes meet at least once."""
    return pytest.mark.parametrize(tuple(axes), cover(product(*axes.values())))


def cover(rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return some of ``rows`` in which every two values meet that meet in any: always the same, by greed."""
    left = {tuple(row): pairs(row) for row in rows}
    wanted = set().union(*left.values())
    chosen = []
    while wanted:
        best = max(left, key=lambda row: len(left[row] & wanted))
        wanted -= left.pop(best)
        chosen.append(best)
    return chosen


def pairs(row: Sequence[Any]) -> set[Pair]:
    """Return every two values of a row, with their places."""
    return {(a, row[a], b, row[b]) for a, b in combinations(range(len(row)), 2)}
