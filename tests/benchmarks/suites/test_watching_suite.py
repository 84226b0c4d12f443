"""A comparison some of whose rows are watched: what the watch has seen and done is on record and in the table."""

from dataclasses import replace

import pytest
import torch
from report_records import chart, section_of, texts
from tiny_suite import PLAIN, TASK, training

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import measure
from gradfree.benchmarks.suites.watching import WatchedRow, Watching

OFF = Row("highway_bp k=0", "highway_bp", {"iterations": 0})
WATCHED = WatchedRow("highway_bp k=0, watched", "highway_bp", OFF.options, every=3, least_cosine=0.9999)


def test_a_watched_run_looks_and_acts_and_a_row_that_is_not_is_another_case():
    torch.set_default_dtype(torch.float32)
    part = Watching(replace(TASK, learning_rate=0.1), (PLAIN, OFF, WATCHED))
    cases = list(part.training(0, "cpu", {}))
    assert len({case.id for case in cases}) == 3
    assert cases[1].config == training(OFF, task=part.task).config
    assert list(part.timing("cpu")) == []
    records = {case.id: measure(case) for case in cases}
    seen = records[cases[2].id]["results"]
    assert list(seen["looks"])[:2] == [0, 1]
    assert 1 <= seen["risen"] <= 3
    assert seen["fidelity"][0]["cosine"] == records[cases[1].id]["results"]["fidelity"][0]["cosine"] < 0.9999
    section = section_of(part, records)
    *_, watched = texts(section)
    assert watched[-2:] == [str(seen["risen"]), f"{int(seen['exact'])} of 1"]
    assert not [sentence for sentence in section.sentences if "not timed" in sentence]
    points = chart(section, f"{TASK.name}: what watching sees, a line a run").points
    assert points["y"].to_list() == pytest.approx(list(seen["looks"].values()))
