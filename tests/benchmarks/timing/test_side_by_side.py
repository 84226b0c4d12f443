"""Interleaved timing: failed steps do not affect others, and each row's memory is also that of a process."""

import os
import signal
from multiprocessing import current_process

import pytest
import torch
from report_records import section_of

from gradfree.benchmarks.records.records import attempt
from gradfree.benchmarks.running.workers import run_here
from gradfree.benchmarks.timing import allocations
from gradfree.benchmarks.timing.side_by_side import MIB, interleaved
from gradfree.benchmarks.timing.timed import Timings, timed


@timed(kind="counting", subject="names", metric="time", rounds=3, runs=1, title="letters")
def counting(case):
    """Return steps that report as many seconds as their names have letters, plus one."""
    return {name: lambda name=name: build(name) for name in case.item}


def build(name):
    if name == "unbuildable":
        raise MemoryError("no room")

    def step():
        if name == "failing":
            raise RuntimeError("no such kernel")
        return len(name) + 1.0

    return step


def test_failed_steps_do_not_prevent_the_timing_of_others():
    names = ("abc", "unbuildable", "failing", "abcdefg")
    part = Timings(counting, (names,))
    (case,) = part.timing("cpu")
    record = attempt(case)
    rows = record["results"]["rows"]
    assert [row["label"] for row in rows] == list(names)
    assert [row["error"].splitlines()[-1] for row in rows[1:3]] == [
        "MemoryError: no room",
        "RuntimeError: no such kernel",
    ]
    assert (rows[0]["ratio"], rows[3]["time"], rows[3]["ratio"]) == (1.0, 8.0, 2.0)
    section = section_of(part, {case.id: record})
    assert section.verdicts == ["the baseline", "not timed", "not timed", "2.00× slower than abc"]
    assert any(sentence.endswith("failing did not run: RuntimeError: no such kernel.") for sentence in section.remarks)


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [([1.0, 1.05, 1.0], 3), ([1.0, 1.3, 1.0, 1.0, 1.0, 1.0], 6), ([1.0, 2.0, 3.0] * 4, 9)],
    ids=["steady", "steady in the end", "never steady"],
)
def test_unsteady_steps_have_more_rounds(seconds, rounds):
    """Six rounds with one outlier are steady, three are not."""
    taken = interleaved([lambda: 1.0, iter(seconds).__next__], rounds=3, repeats=3)
    assert taken == [[1.0] * rounds, seconds[:rounds]]


@timed(kind="filling", subject="MiB", rounds=3, repeats=1, runs=1, with_memory=True)
def filling(case):
    """Return steps that fill as many MiB; "killed" ends the process of its own."""
    return {name: lambda name=name: lambda: fill(name) for name in case.item}


def fill(name):
    if name != "killed":
        torch.ones(int(name) * MIB, dtype=torch.uint8)
    elif "ForkProcess" in current_process().name:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.processes
def test_the_peak_of_a_process_grows_by_what_its_row_fills():
    """Whatever the other rows fill; a row whose process is killed has times, but no peak."""
    part = Timings(filling, (("500", "1", "201", "killed"),))
    (case,) = part.timing("cpu")
    (record,) = run_here([case])
    rows = record["results"]["rows"]
    most, low, high = (row["process_peak"] / MIB for row in rows[:3])
    assert high - low == pytest.approx(200, abs=20)
    assert most - low == pytest.approx(499, abs=20)
    assert "process_peak" not in rows[3]
    assert all(len(row["times"]) == 3 for row in rows)
    section = section_of(part, {case.id: record})
    assert section.head[-1] == "process peak (MiB)"
    assert [row[-1].text for row in section.rows] == [*(f"{peak:.0f}" for peak in (most, low, high)), "–"]


class Lost:
    """What the profiler has seen, without its events."""

    def events(self):
        return []


@pytest.mark.parametrize("losses", [0, 2, 3])
def test_memory_is_measured_again_where_the_profiler_loses_its_events(losses, monkeypatch):
    stop, runs = allocations._disable_profiler, []

    def work():
        runs.append(1)
        return torch.empty(1000, dtype=torch.uint8)

    def lossy():
        found = stop()
        return Lost() if len(runs) <= losses else found

    monkeypatch.setattr(allocations, "_disable_profiler", lossy)
    if losses == 3:
        with pytest.raises(RuntimeError, match="measure again"):
            allocations.peak_memory(work, "cpu")
    else:
        assert allocations.peak_memory(work, "cpu") == 1000
