"""What a rank of a forward-only pipeline does in a step, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Job = tuple[Literal["first pass", "feedback", "second pass"], int]


def order(position: int, count: int, microbatches: int) -> Iterator[Job]:
    """Yield the jobs of one rank, each with the number of its microbatch.

    As many first passes as there are ranks go ahead: then the first error is back, and each second pass makes room for
    another first one. The transposed weights go back meanwhile, from the last rank, whose weights are the last
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
