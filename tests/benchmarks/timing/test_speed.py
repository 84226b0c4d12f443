"""Timings in turns: what fails costs the others nothing, and every step has its turn in every round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from gradfree.benchmarks.timing.side_by_side import Timing


@dataclass(frozen=True, kw_only=True)
class Counting(Timing[Callable]):
    """Steps whose turns are told, and take as long as there are letters in their names."""

    kind: ClassVar[str] = "counting"
    topic = "counting"
    names: tuple[str, ...]
    rounds: ClassVar[int] = 3
    log: ClassVar[list] = []

    def steps(self) -> Mapping:
        return {name: lambda name=name: self.build(name) for name in self.names}

    def build(self, name):
        if name == "unbuildable":
            raise MemoryError("no room")
        return lambda: name

    def turn(self, step):
        if step() == "failing":
            raise RuntimeError("no such kernel")
        self.log.append((step(), torch.get_num_threads()))
        return float(len(step())), 1.0


def counting(*names, threads=None):
    Counting.log.clear()
    return Counting(names=names, threads=threads, device="cpu", seed=0)


def test_steps_that_fail_cost_the_others_no_timing():
    rows = counting("abc", "unbuildable", "failing", "abcdefg").run()["rows"]
    assert [row["label"] for row in rows] == ["abc", "unbuildable", "failing", "abcdefg"]
    assert [row["error"].splitlines()[-1] for row in rows[1:3]] == [
        "MemoryError: no room",
        "RuntimeError: no such kernel",
    ]
    assert (rows[0]["ratio"], rows[3]["time"], rows[3]["ratio"]) == (1.0, 8.0, 2.0)


def test_nothing_is_timed_without_the_baseline():
    with pytest.raises(RuntimeError, match="no such kernel"):
        counting("failing", "abc").run()


def test_steps_take_turns_with_the_threads_of_the_case():
    before = torch.get_num_threads()
    counting("a", "b", threads=before + 1).run()
    assert Counting.log == [("a", before + 1), ("b", before + 1)] * 4
    assert torch.get_num_threads() == before


def test_rows_and_threads_are_in_the_config_of_those_that_have_some():
    assert counting("a").config == {"device": "cpu", "names": ["a"]}
    assert counting("a", threads=2).config == {"device": "cpu", "names": ["a"], "threads": 2}
    assert [counting("a", threads=n).subject for n in (None, 2)] == ["all rows", "all rows, 2 threads"]
