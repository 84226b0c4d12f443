"""Timings of the reverse scan: what is run, and what becomes of the figures."""

from dataclasses import replace

import pytest
import torch
from oracles import loop
from report_records import chart, lines, markdown, section_of, told

from gradfree.algebra.reference_scans import ANY_FACTORS, CONSTANT_FACTORS
from gradfree.benchmarks.timing import scans
from gradfree.benchmarks.timing.scans import Operands, ScanTiming, ScanTimings

SIZES = (8, 1, 2), (6, 2, 3)
PART = ScanTimings(tuple(Operands(*size, constant) for constant in (True, False) for size in SIZES), threads=1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("length", [2, 7, 64])
@pytest.mark.parametrize("label", [label for label in CONSTANT_FACTORS if label != "copy"])
def test_every_method_solves_the_recurrence(label, length):
    terms, method = torch.randn(length, 3, 4), CONSTANT_FACTORS[label]
    kinds = [torch.rand(4), torch.linspace(0, 1, 4)] + [torch.rand(length, 3, 4)] * (label in ANY_FACTORS)
    for factors in kinds:
        try:
            y = method(terms, factors)
        except Exception as error:
            assert label == "associative_scan"
            pytest.skip(f"torch's prototype does not work here: {error}")
        torch.testing.assert_close(y, loop(terms, factors, True), rtol=1e-10, atol=1e-10)


def test_there_is_a_case_for_each_size_and_kind_of_factors():
    cases = list(PART.timing("cpu"))
    assert [case.topic for case in cases] == ["scan (8, 1, 2)", "scan (6, 2, 3)"] * 2
    assert [case.operands.constant for case in cases] == [True, True, False, False]
    assert len({case.id for case in cases}) == 4


def test_a_timing_leaves_out_methods_that_fail(monkeypatch):
    def fail(terms, factors):
        raise NotImplementedError

    monkeypatch.setitem(scans.ANY_FACTORS, "associative_scan", fail)
    timing = ScanTiming(operands=Operands(8, 1, 2, False), threads=1, device="cpu", seed=0)
    rows = timing.run()["rows"]
    assert [row["label"] for row in rows] == ["copy", "gradfree", "loop", "doubling"]
    assert rows[0]["ratio"] == 1.0


def fake(case, **ratios):
    rows = [
        {
            "label": label,
            "time": ratio * 1e-5,
            "time_quartiles": [ratio * 0.8e-5, ratio * 1e-5],
            "ratio": ratio,
            "ratio_quartiles": [0.8 * ratio, ratio],
        }
        for label, ratio in ratios.items()
    ]
    return {case.id: {"kind": case.kind, "config": case.config, "results": {"rows": rows}}}


def test_the_section_shows_every_size_and_says_where_the_scan_is_slow():
    first, _, second, _ = PART.timing("cpu")
    records = fake(first, copy=1.0, gradfree=2.5, loop=4.0, FFT=30.0)
    records |= fake(second, copy=1.0, gradfree=3.5, loop=5.0, doubling=6.0)
    section = section_of(PART, records)
    text = markdown(section)
    assert "| (8, 1, 2), constant | 10 | 2.5 | 4.0 | – | – | 30.0 |" in text
    assert "| (8, 1, 2), of each step | 10 | 3.5 | 5.0 | 6.0 | – | – |" in text
    slow, unsteady = section.remarks
    assert slow == "gradfree's takes more than 3 copies at (8, 1, 2), of each step (3.5)."
    assert "but for 8 of 8 timings, most of all" in unsteady
    drawn = chart(section, "factors of each step, cpu: time against size")
    assert lines(drawn)["gradfree"] == [["(8, 1, 2)", 3.5]]
    assert drawn.rules == {"3 copies": 3.0}
    assert told(section, row="gradfree", setting="(8, 1, 2), constant", unit="× copy") == (2.5, 2.0, 2.5, 0)
    assert section_of(PART, {}) is None


def test_sizes_are_drawn_by_their_number_of_elements():
    part = replace(PART, subjects=(Operands(6, 2, 3, True), Operands(8, 1, 2, True)))
    larger, smaller = part.timing("cpu")
    drawn = chart(
        section_of(part, fake(larger, copy=1.0, gradfree=2.0) | fake(smaller, copy=1.0, gradfree=3.0)), "size"
    )
    assert lines(drawn) == {"gradfree": [["(8, 1, 2)", 3.0], ["(6, 2, 3)", 2.0]]}
