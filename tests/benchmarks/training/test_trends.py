"""Comparisons that differ in one setting make a curve of time and memory."""

from dataclasses import dataclass, replace

import pytest
from report_records import chart, failed, lines, rounds, texts, trained
from tiny_suite import HIGHWAY, PLAIN, TASK, fake, points

from gradfree.benchmarks.reports.publication import page
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.training.comparison import Comparison

ROWS = (PLAIN, HIGHWAY)


@dataclass(frozen=True)
class Sequences:
    """Data of a length that can be named."""

    length: int

    def __call__(self):
        return points()


def sized(depth, batch=8, length=16, device="cpu"):
    """A comparison, and the record of its costs: 10 ms and 2 MiB a block, Highway-BP half of it."""
    options = {**TASK.options, "depth": depth, "context": length}
    name = f"points depth={depth} batch={batch} length={length}"
    task = replace(TASK, name=name, options=options, batch_size=batch, data=Sequences(length))
    part = Comparison(task, ROWS)
    (case,) = part.timing(device)
    costs = [rounds(row.label, depth * share, 2 * depth * share) for row, share in zip(ROWS, (1.0, 0.5), strict=True)]
    return part, fake(case, {"rows": costs})


def trend_sections(*sized_parts):
    suite = tuple(part for part, _ in sized_parts)
    sections = SuiteReport.of("", suite, dict(record for _, record in sized_parts)).sections
    return [section for section in sections if section.title.startswith("cost against")]


def test_one_setting_with_several_values_is_a_curve():
    (trend,) = trend_sections(sized(8), sized(2), sized(4))
    assert trend.title == "cost against depth: residual_mlp, from points depth=2 batch=8 length=16, device: cpu"
    assert texts(trend) == [
        ["backprop", "20.0 [4.0]", "40.0 [8.0]", "80.0 [16.0]"],
        ["highway_bp k=1", "10.0 [2.0]", "20.0 [4.0]", "40.0 [8.0]"],
    ]
    times = chart(trend, "residual_mlp, cpu: time against depth")
    assert (times.x.title, times.y.title) == ("depth (count)", "time of a step (ms)")
    assert lines(times)["highway_bp k=1"] == [[2, 10], [4, 20], [8, 40]]
    assert times.points.select("y_low", "y_high").row(0) == pytest.approx((19.9, 20.1))
    memory = chart(trend, "residual_mlp, cpu: memory against depth")
    assert memory.y.title == "peak memory of a step (MiB)"
    assert lines(memory)["backprop"] == [[2, 4], [4, 8], [8, 16]]


def test_each_setting_has_its_own_curve_along_which_all_others_stay():
    trends = trend_sections(sized(2), sized(4), sized(8), sized(4, batch=16), sized(2, length=32), sized(8, batch=16))
    assert {trend.title.partition(":")[0]: trend.head[1:] for trend in trends} == {
        "cost against depth": ["2", "4", "8"],
        "cost against batch size": ["8", "16"],
        "cost against length": ["16", "32"],
    }


def test_comparisons_that_differ_in_more_are_no_curve():
    assert trend_sections(sized(2), sized(4, batch=16)) == []
    assert trend_sections(sized(2), sized(4, device="cuda")) == []
    assert trend_sections(sized(2)) == []


def test_what_failed_is_left_out_of_the_curve():
    part, (name, _) = sized(4)
    (case,) = part.timing("cpu")
    (trend,) = trend_sections(sized(2), (part, failed(case)), sized(8))
    assert name == case.id
    assert texts(trend)[0] == ["backprop", "20.0 [4.0]", "80.0 [16.0]"]


def test_what_was_trained_and_not_timed_has_no_costs_to_show():
    """A table of a head alone would be one without a word on why, and no page can be made of it."""
    parts = [part for part, _ in map(sized, (2, 4))]
    records = dict(r for part in parts for r in trained(PLAIN, [90], [90], task=part.task))
    report = SuiteReport.of("", tuple(parts), records)
    assert [section.title.partition(" ")[0] for section in report.sections] == ["points", "points"]
    assert "<h1>" in page(report)
    (trend,) = SuiteReport.of("", tuple(parts), records | dict([sized(2)[1], sized(4)[1]])).sections[2:]
    assert trend.head[1:] == ["2", "4"]
