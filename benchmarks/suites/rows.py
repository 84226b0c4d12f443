"""Rows that several suites share."""

from __future__ import annotations

from gradfree.benchmarks.records.case import Row

BACKPROP = Row("backprop", "backprop", {"plain": True})
TRUNCATED = Row("truncated w=1", "truncated", {"window": 1})
DSF = Row("dsf linspace", "dsf", {"feedback": "linspace"})
DSF_GATE = Row("dsf gate", "dsf", {"feedback": "gate"})


def iterated(engine: str, *counts: int) -> tuple[Row, ...]:
    """Return a row of ``engine`` for each number of iterations."""
    return tuple(Row(f"{engine} k={k}", engine, {"iterations": k}) for k in counts)
