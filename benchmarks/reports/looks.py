"""One look for each label through all charts of a report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm
from typing import NamedTuple

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933", "#888888"]
"""Told apart by the color-blind too, on white and on black: Okabe and Ito's, without the yellow and the black, and
Paul Tol's "muted" purple, olive and grey."""
SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left", "triangle-right"]
_PAIRS = frozenset(range(lcm(len(COLORS), len(SHAPES))))
_SHADES = ["#31446b", "#666970", "#958f78", "#cab969", "#ffea46"]
"""Of cividis, which the color-blind see alike."""


class Look(NamedTuple):
    """Color and shape of a label's points."""

    color: str
    shape: str


class Looks:
    """Colors and shapes in one report: what has the same label looks the same in all charts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, labels: Collection[str]) -> dict[str, Look]:
        """Return the look of each label of a chart.

        So many labels differ as there are pairs of the two. A new one shares neither with others of the chart if it
        can be, the color least of all.
        """
        for label in labels:
            if label not in self._numbers:
                beside = [self._numbers[other] for other in labels if other in self._numbers]
                free = _PAIRS.difference(self._numbers.values()) or _PAIRS
                self._numbers[label] = min(free, key=lambda n: (*_shared(n, beside), n))
        return {label: _look(self._numbers[label]) for label in labels}


def shades(count: int) -> list[str]:
    """Return colors of what is no engine, from dark to light."""
    last = len(_SHADES) - 1
    return [_SHADES[round(n * last / max(1, count - 1))] for n in range(count)]


def _look(n: int) -> Look:
    return Look(COLORS[n % len(COLORS)], SHAPES[n % len(SHAPES)])


def _shared(n: int, others: Sequence[int]) -> tuple[int, ...]:
    """Return how many of ``others`` have the color of ``n``, and how many the shape."""
    return tuple(
        sum(one == other for other in looks)
        for one, looks in zip(_look(n), zip(*map(_look, others), strict=True), strict=False)
    ) or (0, 0)
