"""Ranks as an axis: ways to spread one model over processes, timed in one group of them, beside pipelines of torch."""

import pytest
import torch
from report_records import chart, lines, markdown, section_of
from tiny_suite import fake

from gradfree.benchmarks.maps.rank_steps import OnRanks, rank_steps
from gradfree.benchmarks.suites.ranks import RANKS
from gradfree.benchmarks.timing.side_by_side import statistics
from gradfree.benchmarks.timing.timed import Timing, Timings

ROWS = RANKS[0].rows
PART = Timings(rank_steps, (OnRanks(8, 0.0, 2, 1), OnRanks(8, 0.0, 2, 2)), (ROWS[0], ROWS[5], ROWS[6]), threads=1)
WHOLE, HALVES = PART.timing("cpu")


@pytest.mark.processes
@pytest.mark.slow
def test_every_way_is_timed_on_processes_of_its_own():
    """And a rank holds half of what one process does, weights, states and activations."""
    torch.set_default_dtype(torch.float32)
    one, parts, *ways = HALVES.run()["rows"]
    assert one["label"] == "one process"
    assert parts["label"] == "one process, in parts"
    assert [way["label"] for way in ways] == ["layer_parallel, k = 0", "GPipe", "1F1B"]
    assert ["backward" in row for row in (one, parts, *ways)] == [True, True, True, False, False]
    for row in (one, *ways):
        assert len(row["times"]) == rank_steps.rounds
        assert len(row["rank_times"]) == len(row["rank_memory"]) == 2
    assert one["rank_memory"][1] == 0
    for way in ways:
        assert all(0.45 < size / one["peak_memory"] < 0.6 for size in way["rank_memory"])


@pytest.mark.processes
@pytest.mark.slow
def test_what_fails_on_a_rank_is_recorded_of_that_rank():
    case = Timing(timed=rank_steps, item=OnRanks(1, 0.0, 2, 1), threads=1, device="cpu", seed="no seed")
    # Which rank failed first torch tells by the clock: it may be the one whose peer is gone.
    with pytest.raises(RuntimeError, match=r"^rank [01]: RuntimeError: (manual_seed expected|.*closed by peer)"):
        case.run()


def test_ways_are_left_out_that_cannot_be():
    """A pipeline but GPipe needs as many microbatches as ranks, and sweeps end with the borders."""
    assert [row.label for row in WHOLE.rows] == ["layer_parallel, k = 0", "GPipe"]
    assert [row.label for row in HALVES.rows] == ["layer_parallel, k = 0", "GPipe", "1F1B"]
    two, *_, four = RANKS[0].timing("cpu")
    assert sum("k = " in row.label for row in two.rows) == 2
    assert sum("k = " in row.label for row in four.rows) == 4


def test_the_section_has_a_row_for_each_way_through_each_number_of_ranks():
    def cost(label, time, **more):
        ranks = {"rank_times": [time, time / 2], "rank_memory": [2**20, 2**21], "peak_memory": 2**21}
        return {"label": label, **statistics([time] * 3, [0.3] * 3), **ranks, **more}

    one = cost("one process", 0.3, backward=0.2)
    whole = [one, cost("layer_parallel, k = 0", 0.21, backward=0.11), cost("GPipe", 0.3)]
    parts = cost("one process, in parts", 0.33, backward=0.22)
    halves = [one, parts, cost("layer_parallel, k = 0", 0.18, backward=0.11), cost("1F1B", 0.24)]
    told = [fake(case, {"rows": rows, "messages": [0.0, 0.0]}) for case, rows in ((WHOLE, whole), (HALVES, halves))]
    section = section_of(PART, dict(told))
    text = markdown(section)
    assert "| 2 ranks, m = 1 | layer_parallel, k = 0 | 210 | 0.70 [0.67] | 0.55 | 210, 105 | 1.0, 2.0 |" in text
    # (n + m - 1) / (m n) of a step, which takes 0.01 s more for every part and pass.
    assert "| 2 ranks, m = 2 | 1F1B | 240 | 0.80 [0.83] | – | 240, 120 | 1.0, 2.0 |" in text
    assert len(lines(chart(section, "against microbatches"))["layer_parallel, k = 0"]) == 2
