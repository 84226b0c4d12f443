"""The comparisons that ``gradfree bench run`` can make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradfree.benchmarks.case import Case, Row
from gradfree.benchmarks.speed import Speed
from gradfree.benchmarks.tasks import DIGITS, PYDOC, Task
from gradfree.benchmarks.training import Training


@dataclass(frozen=True)
class Comparison:
    """Engines on one task.

    Attributes:
        task: what is trained.
        rows: the engines. The first is the baseline of the others.
    """

    task: Task
    rows: tuple[Row, ...]

    def speed(self, device: str) -> Speed:
        """Return the case that measures the rows' cost."""
        return Speed(task=self.task, rows=self.rows, device=device, seed=0)


Suite = tuple[Comparison, ...]


def cases(suite: Suite, seeds: int, device: str) -> Iterator[Case]:
    """Yield all cases of ``suite``: a whole comparison seed by seed, then the costs."""
    for seed in range(seeds):
        for comparison in suite:
            for row in comparison.rows:
                yield Training(task=comparison.task, row=row, device=device, seed=seed)
    for comparison in suite:
        yield comparison.speed(device)


_BACKPROP = (Row("backprop", "backprop", {"plain": True}), Row("backprop via chain", "backprop", {}))


def _highway(*iterations: int) -> tuple[Row, ...]:
    return tuple(Row(f"highway_bp k={k}", "highway_bp", {"iterations": k}) for k in iterations)


# γ = 0 throughout. The paper uses 0.2 for pre-LN transformers, but on pydoc's validation data 0 was the better one:
# perplexity 11.8, 10.5, 10.5, 10.5 at k = 0, 1, 2, 4 against 12.1, 10.6, 10.6, 10.5, means of three other seeds.
SUITES: dict[str, Suite] = {
    "quick": (
        Comparison(DIGITS, _BACKPROP + _highway(0, 1, 2, 3, 4, 6)),
        Comparison(PYDOC, _BACKPROP + _highway(0, 1, 2, 4)),
    ),
}
