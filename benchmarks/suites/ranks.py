"""The suite of one model on several ranks: engines for it beside pipelines of torch, at one global batch."""

from __future__ import annotations

from gradfree.benchmarks.maps.rank_steps import OnRanks, Pipelined, rank_steps
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.experiment import Suite
from gradfree.benchmarks.timing.timed import Timings

_ROWS = (
    *(Row(f"layer_parallel, k = {k}", "highway_bp", {"iterations": k}) for k in (0, 1, 2, 3)),
    Row("layer_parallel, backprop", "backprop", {}),
    Pipelined("GPipe", "backprop", {}, "GPipe"),
    Pipelined("1F1B", "backprop", {}, "1F1B"),
    Pipelined("interleaved zero-bubble", "backprop", {}, "InterleavedZeroBubble"),
    Pipelined("ZBV zero-bubble", "backprop", {}, "ZBVZeroBubble"),
)
_WAITS = 0.012


def _on_ranks(depth: int, waits: float, *sizes: tuple[int, int]) -> Timings:
    chains = tuple(OnRanks(depth, waits, ranks, microbatches) for ranks, microbatches in sizes)
    return Timings(rank_steps, chains, _ROWS, threads=1, title=f"one model on several ranks: {chains[0].what}")


RANKS: Suite = (
    _on_ranks(16, _WAITS, *((n, m) for n in (2, 4) for m in (1, n, 4 * n))),
    _on_ranks(64, 0.0, *((n, m) for n in (2, 4) for m in (1, n))),
)
