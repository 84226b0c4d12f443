"""What a rank of a forward-only pipeline does in a step, in which order; how long steps take by that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Job = tuple[Literal["first pass", "feedback", "second pass"], int]


def order(position: int, count: int, microbatches: int) -> Iterator[Job]:
    """Yield the jobs of one rank, each with the number of its microbatch.

    As many first passes as there are ranks go ahead: then the first error is back, and each second pass makes room for
    another first one. The transposed weights go the other way meanwhile, from the last rank, whose weights are the last
    to be those of this step: each rank carries them on when they come by.

    Args:
        position: of the rank, from 0.
        count: of ranks.
        microbatches: of a step.
    """
    ahead = min(count, microbatches)
    met = min(ahead, count - position)
    yield from (("first pass", j) for j in range(met))
    yield "feedback", 0
    yield from (("first pass", j) for j in range(met, ahead))
    for j in range(microbatches):
        yield "second pass", j
        if j + ahead < microbatches:
            yield "first pass", j + ahead


def share(count: int, microbatches: int, more: bool = True) -> float:
    """Return a step's time as a share of one process's, if links, errors and transposed weights cost nothing.

    A unit each for a run's first pass, second pass, and gradients of its weights; what goes on is sent between the two
    last. 1F1B takes (1 + (count - 1) / microbatches) / count.

    Args:
        count: of ranks.
        microbatches: of a step.
        more: whether other steps come before and after: a rank goes on to the next one when it has done its part.
    """
    if more:
        units = max(3 * microbatches, 2 * microbatches + count)
    else:
        units = max(3 * microbatches + count - 1, 2 * (microbatches + count) - 1)
    return units / (3 * microbatches * count)
