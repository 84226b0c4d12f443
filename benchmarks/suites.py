"""The comparisons that ``gradfree bench run`` can make."""

from __future__ import annotations

from gradfree.benchmarks.case import Row
from gradfree.benchmarks.comparison import Comparison
from gradfree.benchmarks.part import Suite
from gradfree.benchmarks.tasks import DIGITS, PYDOC

_BACKPROP = (Row("backprop", "backprop", {"plain": True}), Row("backprop via chain", "backprop", {}))


def _highway(*iterations: int) -> tuple[Row, ...]:
    return tuple(Row(f"highway_bp k={k}", "highway_bp", {"iterations": k}) for k in iterations)


# γ = 0 throughout. The paper uses 0.2 for pre-LN transformers, but on pydoc's validation data 0 was the better one:
# perplexity 11.7, 10.4, 10.5, 10.8 at k = 0, 1, 2, 4 against 12.0, 10.8, 10.5, 10.9, means of three other seeds.
SUITES: dict[str, Suite] = {
    "quick": (
        Comparison(DIGITS, _BACKPROP + _highway(0, 1, 2, 3, 4, 6)),
        Comparison(PYDOC, _BACKPROP + _highway(0, 1, 2, 4)),
    ),
}
