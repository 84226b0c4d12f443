"""Each row's memory as the peak of a process of its own."""

import os
import signal
from multiprocessing import parent_process

import pytest
import torch

from gradfree.benchmarks.timing.side_by_side import MIB
from gradfree.benchmarks.timing.timed import Timing, timed

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@timed(kind="filling", rounds=3, runs=1, with_memory=True)
def filling(case):
    """Return steps that fill as many MiB; "killed" ends the process of its own."""
    return {name: lambda name=name: lambda: fill(name) for name in case.item}


def fill(name):
    if name != "killed":
        torch.ones(int(name) * MIB, dtype=torch.uint8)
    elif parent_process():
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_row_that_fills_200_mib_more_has_a_peak_200_mib_higher_even_beside_rows_that_need_more():
    rows = Timing(timed=filling, item=("500", "1", "201", "killed"), device="cpu", seed=0).run()["rows"]
    most, low, high = (row["process_peak"] / MIB for row in rows[:3])
    assert high - low == pytest.approx(200, abs=20)
    assert most - low == pytest.approx(499, abs=20)
    assert "process_peak" not in rows[3]
    assert all(len(row["times"]) == 3 for row in rows)
