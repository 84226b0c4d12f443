"""One look for each label through all charts of a report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import lcm
from typing import NamedTuple

COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933", "#888888"]
"""Told apart by the color-blind too, on white and on black: Okabe and Ito's, without the yellow and the black, and
Paul Tol's "muted" purple, olive and grey."""
SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left", "triangle-right"]
_PALE = "#b8b8b8"
_PAIRS = frozenset(range(lcm(len(COLORS), len(SHAPES))))
_SHADES = ["#31446b", "#666970", "#958f78", "#cab969", "#ffea46"]
"""Of cividis, which the color-blind see alike."""


class Look(NamedTuple):
    """Color and shape of a label's points."""

    color: str
    shape: str

    def faded(self, strength: float) -> Look:
        """Return the same with a color that is this strong: 0 is grey, 1 the color itself."""
        parts = [[int(color[n : n + 2], 16) for n in (1, 3, 5)] for color in (_PALE, self.color)]
        mixed = (round(pale + strength * (own - pale)) for pale, own in zip(*parts, strict=True))
        return self._replace(color="#" + "".join(f"{part:02x}" for part in mixed))


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
    return tuple(sum(_look(n)[part] == _look(other)[part] for other in others) for part in range(2))
