"""Timings of single recurrent layers: what is run, and what becomes of the figures."""

import pytest
import torch
from report_records import TRACEBACK, chart, lines, markdown, section_of, texts, told

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.recurrent_layers import CellLoop, LayerPass, LayerTiming, LayerTimings, RecurrentLayer

BACKPROP = Row("backprop", "backprop", {})
HIGHWAY = Row("highway_bp k=0", "highway_bp", {"iterations": 0})
LAYERS = (RecurrentLayer("GRU", 2, 4, 3), RecurrentLayer("GRU", 2, 8, 3), RecurrentLayer("RNN", 2, 4, 3))
PART = LayerTimings(LAYERS, (BACKPROP, HIGHWAY), threads=1)


def case(layer, rows=(BACKPROP, HIGHWAY)):
    return LayerTiming(layer=layer, rows=rows, threads=1, device="cpu", seed=0)


def test_engines_that_need_a_gate_are_not_run_on_cells_without():
    labels = [[row.label for row in timing.rows] for timing in PART.timing("cpu")]
    assert labels == [["backprop", "highway_bp k=0"], ["backprop", "highway_bp k=0"], ["backprop"]]


@pytest.mark.parametrize("cell", ["GRU", "LSTM", "RNN"])
def test_the_loop_over_cells_and_an_engine_do_the_plain_layers_work(cell):
    timing = case(RecurrentLayer(cell, 2, 5, 3), (BACKPROP,))
    torch.set_default_dtype(torch.float64)
    plain, loop, engine = LayerPass(timing), LayerPass(timing, loop=CellLoop), LayerPass(timing, BACKPROP)
    grads = []
    for step in (plain, loop, engine):
        out = step.run()
        grads.append([out, *torch.autograd.grad(out, [step.x, *step.module.parameters()], plain.cotangent)])
    for other in grads[1:]:
        for actual, expected in zip(other, grads[0], strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_a_timing_names_its_rows_and_sets_them_against_the_plain_layer():
    rows = case(RecurrentLayer("GRU", 2, 4, 3)).run()["rows"]
    labels = ["plain", "loop over cells", "backprop", "highway_bp k=0", "backprop, lean"]
    assert [row["label"] for row in rows] == labels
    assert list(case(RecurrentLayer("LSTM", 2, 4, 3)).steps()) == labels[:-1]
    assert rows[0]["ratio"] == 1.0
    assert all(row["peak_memory"] > 0 and len(row["times"]) == len(rows[0]["times"]) for row in rows)


def fake(layer, part=PART, **ratios):
    timing = next(t for t in part.timing("cpu") if t.layer == layer)
    rows = [
        {
            "label": label,
            "time": ratio / 1e3,
            "time_quartiles": [0.9 * ratio / 1e3, 1.05 * ratio / 1e3],
            "ratio": ratio,
            "ratio_quartiles": [0.9 * ratio, 1.05 * ratio],
            "peak_memory": 100,
        }
        for label, ratio in ratios.items()
    ]
    return {timing.id: {"kind": timing.kind, "config": timing.config, "results": {"rows": rows}}}


def test_the_section_shows_every_layer_and_says_where_an_engine_is_slower():
    small, long, plain_rnn = LAYERS
    ratios = {"plain": 1.0, "loop over cells": 2.0, "backprop": 1.5, "highway_bp k=0": 0.5, "backprop, lean": 1.25}
    records = fake(small, **ratios)
    records |= fake(long, **{"plain": 1.0, "loop over cells": 3.0, "backprop": 0.5, "highway_bp k=0": 0.25})
    records |= fake(plain_rnn, **{"plain": 1.0, "loop over cells": 3.0, "backprop": 0.75})
    section = section_of(PART, records)
    text = markdown(section)
    assert "| GRU (2, 4, 3) | 1.0 | 2.00 [1.0] | 1.50 [1.0] | 0.50 [1.0] | 1.25 [1.0] |" in text
    assert "| RNN (2, 4, 3) | 1.0 | 3.00 [1.0] | 0.75 [1.0] | – | – |" in text
    assert section.verdicts == [
        "fastest is highway_bp k=0, 2.00× faster than the plain layer; "
        "slower: backprop (1.50×), backprop, lean (1.25×)",
        "fastest is highway_bp k=0, 4.00× faster than the plain layer",
        "fastest is backprop, 1.33× faster than the plain layer",
    ]
    assert section.remarks == ["Quartiles are within 10 % of the median."]
    time = {"metric": "time of forward and backward"}
    assert told(section, row="backprop", setting="GRU (2, 4, 3)", unit="× plain", **time)[:2] == (1.5, 1.35)
    assert told(section, row="plain", setting="GRU (2, 8, 3)", unit="s", **time)[0] == 1e-3
    assert section_of(PART, {}) is None


def test_time_and_memory_are_drawn_against_what_was_swept():
    part = LayerTimings((*LAYERS, RecurrentLayer("GRU", 6, 8, 3)), PART.rows, threads=1)
    records = {}
    for timing, ratio in zip(part.timing("cpu"), (0.5, 0.25, 1.0, 0.125), strict=True):
        records |= fake(timing.layer, part, **{"plain": 1.0, "backprop": ratio, "highway_bp k=0": ratio})
    section = section_of(part, records)
    assert [drawn.title for drawn in section.charts] == [
        f"GRU, {others}, cpu, 1 threads: {what} against {swept}"
        for others, swept in (("2 sequences, 3 units", "steps, 4 to 8"), ("8 steps, 3 units", "sequences, 2 to 6"))
        for what in ("time", "memory")
    ]
    for swept, points in ("steps", [[4, 0.5], [8, 0.25]]), ("sequences", [[2, 0.25], [6, 0.125]]):
        against = f"against {swept}, {points[0][0]} to {points[1][0]}"
        assert lines(chart(section, f"time {against}")) == {"backprop": points, "highway_bp k=0": points}
        memory = chart(section, f"memory {against}")
        assert lines(memory)["backprop"] == [[x, 1.0] for x, _ in points]
        assert memory.x.title == f"{swept} (count)"


def test_a_layer_that_failed_is_a_row_without_figures():
    small, long, _ = LAYERS
    (name, record), *_ = fake(long, plain=1.0).items()
    records = fake(small, plain=1.0, backprop=0.5) | {name: {**record, "results": {}, "error": TRACEBACK}}
    section = section_of(PART, records)
    assert texts(section) == [
        ["GRU (2, 4, 3)", "1.0", "0.50 [1.0]"],
        ["GRU (2, 8, 3)", "failed", "–"],
    ]
    assert section.verdicts[1] == "failed"
    assert section.remarks[-1] == "GRU (2, 8, 3) did not run: RuntimeError: out of | memory."


def test_an_engine_that_failed_is_named_and_costs_the_others_nothing():
    small, *_ = LAYERS
    records = fake(small, plain=1.0, backprop=0.5)
    (record,) = records.values()
    record["results"]["rows"].append({"label": "highway_bp k=0", "error": TRACEBACK})
    section = section_of(PART, records)
    assert texts(section) == [["GRU (2, 4, 3)", "1.0", "0.50 [1.0]"]]
    assert section.remarks[-1] == "GRU (2, 4, 3), highway_bp k=0 did not run: RuntimeError: out of | memory."
