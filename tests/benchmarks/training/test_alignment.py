"""The alignment of cotangents and feedback weights is recorded, and shown by depth and by step."""

from dataclasses import replace

import pytest
from report_records import chart, lines, markdown, section_of, table_rows
from tiny_suite import HIGHWAY, PLAIN, TASK, fake, training

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.training.comparison import Comparison

FA = Row("fa", "fa", {"feedback": "frsf"})
ROWS = Comparison(TASK, (PLAIN, HIGHWAY, FA))


def test_training_records_the_cosines_of_the_blocks_cotangents():
    (first, *_), deepest = training(HIGHWAY).run()["fidelity"], 1.0
    depths, cosines, ratios = zip(*first["states"], strict=True)
    assert list(depths) == sorted(depths)
    assert 0 < depths[0] < depths[-1] < deepest
    assert cosines[-1] == ratios[-1] == 1
    assert 0 < cosines[0] < 1
    assert "feedback" not in first


def probe(step, *cosines):
    states = [(0.25 * n, cosine, 2 * cosine) for n, cosine in enumerate((*cosines, 1.0), 1)]
    return {"step": step, "cosine": 0.5, "relative_error": 0.5, "states": states}


def test_alignment_excludes_the_last_block_and_is_drawn_by_depth_and_by_step():
    probes = {0: [probe(0, 0.1, 0.3), probe(9, 0.5, 0.7)], 1: [probe(0, 0.3, 0.5), probe(9, 0.7, 0.9)]}
    results = {"losses": [], "validation": 90, "test": 90}
    records = dict(
        fake(training(HIGHWAY, seed=seed), {**results, "fidelity": fidelity}) for seed, fidelity in probes.items()
    )
    plain = {**results, "fidelity": [{"step": 0, "cosine": 1.0, "relative_error": 0.0}]}
    records |= dict([fake(training(PLAIN), plain)])
    section = section_of(ROWS, records)
    (highway,) = [row for row in table_rows(markdown(section)) if row[0] == HIGHWAY.label]
    assert highway[-2:] == ["0.500", "1"]
    assert lines(chart(section, "alignment by depth, behind the training")) == {
        HIGHWAY.label: [pytest.approx([0.25, 0.6]), pytest.approx([0.5, 0.8])]
    }
    assert lines(chart(section, "alignment over the training")) == {
        HIGHWAY.label: [pytest.approx([0, 0.3]), pytest.approx([9, 0.7])]
    }


def test_fixed_learning_rates_of_rows_have_no_trials():
    part = replace(ROWS, rates={HIGHWAY.label: 0.5})
    assert not list(part.trials("cpu"))
    rates = [case.task.learning_rate for case in part.training(0, "cpu", {})]
    assert rates == [TASK.learning_rate, 0.5, TASK.learning_rate]
    records = dict([fake(training(PLAIN), {"losses": [], "fidelity": [], "validation": 90, "test": 90})])
    assert ", weight_decay=0.01) at the row's rate, warmed up" in section_of(part, records).setup
