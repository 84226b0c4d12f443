"""In how many segments a chain in time runs fastest: a model of two numbers, measured."""

from __future__ import annotations

from functools import cache

# What segments must promise to win, for the copies into segments that the model leaves out.
_MARGIN = 1.5
# What steps that are left over cost at most beside the model, for copies that they need: measured, 1.15 to 1.3.
_LEFT_OVER = 1.2


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

    def cost(count: int) -> float:
        return _steps(length, batch, free, count, burn)

    counts = range(2, max(3, min(1024, length // 8)))
    best = min(counts, key=cost)
    # Of two as good ones the larger: its steps have more rows, and may keep their gates.
    even = min((count for count in reversed(counts) if length % count == 0), key=cost, default=best)
    return even if whole or cost(even) <= _LEFT_OVER * cost(best) else best


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
