"""The model of a step's time is what a simulation of each schedule comes to, operation by operation."""

from functools import cache

import pytest

from gradfree.benchmarks.maps.step_time import StepTime

MODEL = StepTime(forward=7.0, pull=5.0, weights=3.0, overhead=0.25, latency=0.001, transfer=0.002)


def simulated(orders, needs, seconds, message):
    """Return when the last operation ends: each begins behind that before it on its rank, and behind what it needs.

    An operation is (rank, kind, microbatch, sweep); what is needed of another rank takes a message.
    """
    before = {op: own[n - 1] if n else None for own in orders for n, op in enumerate(own)}

    @cache
    def end(op):
        its = [end(before[op])] if before[op] else []
        its += [end(other) + message * (other[0] != op[0]) for other in needs(*op) if other in before]
        return max(its, default=0.0) + seconds[op[1]]

    return max(end(op) for op in before)


def forward_and(backward):
    """Return what operations need: a state from the left, and what ``backward`` says."""

    def needs(rank, kind, j, sweep):
        return [(rank - 1, "f", j, 0)] if kind == "f" else backward(rank, kind, j, sweep)

    return needs


def swept(n, m, k):
    """Forward passes; then of each microbatch what K carries, and sweeps whose changes come from the right."""
    sweeps = range(1, min(k, n - 1) + 1)
    orders = []
    for rank in range(n):
        own = [(rank, "f", j, 0) for j in range(m)]
        for j in range(m):
            own.append((rank, "carry", j, 0))
            for sweep in sweeps:
                own += [(rank, "b", j, sweep), (rank, "change", j, sweep)]
            own += [(rank, "b", j, 0), (rank, "w", j, 0)]
        orders.append(own)

    def backward(rank, kind, j, sweep):
        if kind == "carry" and rank == n - 1:
            return [(n - 1, "f", m - 1, 0)]
        return [(rank + 1, kind, j, sweep)] if kind in ("carry", "change") else []

    return orders, forward_and(backward)


def rank_by_rank(n, m, _):
    orders = [
        [(rank, "f", j, 0) for j in range(m)]
        + [op for j in range(m) for op in ((rank, "b", j, 1), (rank, "b", j, 0), (rank, "w", j, 0))[rank == 0 :]]
        for rank in range(n)
    ]
    return orders, forward_and(lambda rank, kind, j, _: [(rank + 1, "b", j, 1)] if kind == "b" else [])


def gpipe(n, m, _):
    orders = [
        [(rank, "f", j, 0) for j in range(m)] + [op for j in range(m) for op in ((rank, "b", j, 0), (rank, "w", j, 0))]
        for rank in range(n)
    ]
    # The gradients of weights are computed in one with that of the input, which is sent then.
    return orders, forward_and(lambda rank, kind, j, _: [(rank + 1, "w", j, 0)] if kind == "b" else [])


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("schedule", "said", "k"),
    [
        *((swept, StepTime.layer_parallel, k) for k in (0, 1, 2, 7)),
        (rank_by_rank, StepTime.rank_by_rank, None),
        (gpipe, StepTime.gpipe, None),
    ],
)
def test_a_simulation_takes_as_long(n, m, schedule, said, k):
    f, b, w, message = MODEL._turns(n, m)
    seconds = {"f": f, "b": b, "w": w, "carry": 0.0, "change": 0.0}
    found = simulated(*schedule(n, m, k), seconds, message)
    assert said(MODEL, n, m, *([] if k is None else [k])) == pytest.approx(found)


def test_one_rank_is_one_process_and_many_microbatches_leave_no_bubble():
    for said in (StepTime.gpipe, StepTime.one_f_one_b, StepTime.zero_bubble):
        assert said(MODEL, 1, 1) == pytest.approx(MODEL.one_process)
        assert said(StepTime(), 4, 10**6) == pytest.approx(1 / 4, rel=1e-4)
    assert StepTime().one_f_one_b(4, 1) == StepTime().gpipe(4, 1) == pytest.approx(1)
    assert StepTime().zero_bubble(4, 4) == pytest.approx(1 / 4)
    assert StepTime().layer_parallel(4, 10**6, 0) == pytest.approx(1 / 4, rel=1e-4)
