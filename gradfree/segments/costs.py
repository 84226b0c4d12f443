"""In how many segments a chain in time runs fastest: a model of two numbers, measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

# What segments must promise to win, for the copies into segments that the model leaves out.
_MARGIN = 1.5


@cache
def best_count(length: int, batch: int, free: float, burn: int, whole: bool = False) -> int:
    """Return the number of segments, at least 2, in which ``length`` steps run fastest by the model.

    Args:
        length: T.
        batch: B.
        free: as of :func:`rows_for_free`.
        burn: the steps that the first guess takes.
        whole: whether only numbers that leave no step over will do, if there are any.
    """
    counts: Sequence[int] = range(2, max(3, min(1024, length // 8)))
    if whole:
        counts = [count for count in counts if length % count == 0] or counts
    return min(counts, key=lambda count: _steps(length, batch, free, count, burn))


def pays(length: int, batch: int, free: float, burn: int) -> bool:
    """Tell whether segments are expected to win; arguments as those of :func:`best_count`."""
    if length < 4 * burn:
        return False
    count = best_count(length, batch, free, burn)
    return _MARGIN * _steps(length, batch, free, count, burn) < length * (1 + batch / free)


def worth(count: int, batch: int, free: float) -> float:
    """Return how many sweeps of ``count`` segments take as long as one sequential call."""
    return count * (free + batch) / (free + count * batch)


def _steps(length: int, batch: int, free: float, count: int, burn: int) -> float:
    """Return what a guess, a run in segments and the steps that are left over take, in steps of a batch of no rows."""
    return (length // count + burn) * (1 + count * batch / free) + length % count * (1 + batch / free)
