"""Ranges that torch's profiler has seen, and the seconds of those inside a step."""

import pytest
import torch
from torch.profiler import record_function

from gradfree.benchmarks.timing.allocations import allocations, peak_memory
from gradfree.benchmarks.timing.recurrent_phases import Range, ranges, seconds_inside


def test_ranges_are_recorded_in_their_order_and_nothing_else_is():
    with ranges("cpu") as found:
        with record_function("outer"), record_function("inner"):
            torch.ones(3) @ torch.ones(3)
        with record_function("last"):
            pass
    assert [r.name for r in found] == ["outer", "inner", "last"]
    outer, inner, last = found
    assert outer.start <= inner.start <= inner.end <= outer.end <= last.start
    assert all(r.on_host for r in found)
    assert not torch.autograd._profiler_enabled()


def test_recording_ends_where_the_block_fails():
    with pytest.raises(ZeroDivisionError), ranges("cpu"):
        1 / 0  # noqa: B018
    assert not torch.autograd._profiler_enabled()


def test_memory_is_counted_and_the_profiler_says_nothing(capfd):
    """It complains of every thousandth block that is older than the profile, and of itself."""
    old = [torch.ones(8) for _ in range(1001)]

    def work():
        new = torch.ones(1000, dtype=torch.float64)
        old.clear()
        return new

    assert (peak_memory(work, "cpu"), sum(allocations(lambda: torch.ones(1000, dtype=torch.float64)))) == (8000, 8000)
    assert capfd.readouterr().err == ""


def test_a_range_inside_one_of_its_name_counts_once():
    spans = [("a", 0, 4), ("p::x", 10, 20), ("p::x", 12, 15), ("p::y", 13, 14), ("p::x", 20, 25), ("p::x", 40, 50)]
    seen = [Range(*span, on_host=True) for span in spans]
    found = seconds_inside(Range("step", 10, 30, True), seen, "p::")
    assert found == {"x": pytest.approx(15e-9), "y": pytest.approx(1e-9)}
