"""Timings of single recurrent layers: what is run, and what becomes of the figures."""

import pytest
import torch
from matplotlib.figure import Figure

from gradfree.benchmarks.case import Row
from gradfree.benchmarks.layers import Layer, LayerTiming, LayerTimings, Pass, _Loop
from gradfree.benchmarks.report import markdown

BACKPROP = Row("backprop", "backprop", {})
HIGHWAY = Row("highway_bp k=0", "highway_bp", {"iterations": 0})
LAYERS = (Layer("GRU", 2, 4, 3), Layer("GRU", 2, 8, 3), Layer("RNN", 2, 4, 3))
PART = LayerTimings(LAYERS, (BACKPROP, HIGHWAY), threads=1)


def case(layer, rows=(BACKPROP, HIGHWAY)):
    return LayerTiming(layer=layer, rows=rows, threads=1, device="cpu", seed=0)


def test_engines_that_need_a_gate_are_not_run_on_cells_without():
    labels = [[row.label for row in timing.rows] for timing in PART.timing("cpu")]
    assert labels == [["backprop", "highway_bp k=0"], ["backprop", "highway_bp k=0"], ["backprop"]]


@pytest.mark.parametrize("cell", ["GRU", "LSTM", "RNN"])
def test_the_loop_over_cells_and_an_engine_do_the_plain_layers_work(cell):
    timing = case(Layer(cell, 2, 5, 3), (BACKPROP,))
    torch.set_default_dtype(torch.float64)
    plain, loop, engine = Pass(timing), _Loop(timing), Pass(timing, BACKPROP)
    state = {name.removesuffix("_l0"): value for name, value in plain.module.state_dict().items()}
    loop.module.load_state_dict(state)
    grads = []
    for step in (plain, loop, engine):
        out = step.run(step.x)
        grads.append([out, *torch.autograd.grad(out, [step.x, *step.module.parameters()], plain.cotangent)])
    for other in grads[1:]:
        for actual, expected in zip(other, grads[0], strict=True):
            torch.testing.assert_close(actual, expected)


def test_a_timing_names_its_rows_and_sets_them_against_the_plain_layer():
    rows = case(Layer("GRU", 2, 4, 3)).run()["rows"]
    labels = ["plain", "loop over cells", "backprop", "highway_bp k=0", "backprop, lean"]
    assert [row["label"] for row in rows] == labels
    assert [row["label"] for row in case(Layer("LSTM", 2, 4, 3)).run()["rows"]] == labels[:-1]
    assert rows[0]["ratio"] == 1.0
    assert all(row["peak_memory"] > 0 and len(row["times"]) == len(rows[0]["times"]) for row in rows)


def fake(layer, **ratios):
    timing = next(t for t in PART.timing("cpu") if t.layer == layer)
    rows = [
        {"label": label, "time": ratio / 1e3, "ratio": ratio, "ratio_quartiles": [ratio, ratio], "peak_memory": 100}
        for label, ratio in ratios.items()
    ]
    return {timing.id: {"kind": timing.kind, "config": timing.config, "results": {"rows": rows}}}


def test_the_section_shows_every_layer_and_says_where_an_engine_is_slower():
    small, long, plain_rnn = LAYERS
    ratios = {"plain": 1.0, "loop over cells": 2.0, "backprop": 1.5, "highway_bp k=0": 0.5, "backprop, lean": 1.25}
    records = fake(small, **ratios)
    records |= fake(long, **{"plain": 1.0, "loop over cells": 3.0, "backprop": 0.5, "highway_bp k=0": 0.25})
    records |= fake(plain_rnn, **{"plain": 1.0, "loop over cells": 3.0, "backprop": 0.75})
    section = PART.section(records, "cpu")
    text = markdown([section])
    assert "| GRU (2, 4, 3) | 1.0 | 2.00 [1.0] | 1.50 [1.0] | 0.50 [1.0] | 1.25 [1.0] |" in text
    assert "| RNN (2, 4, 3) | 1.0 | 3.00 [1.0] | 0.75 [1.0] | – | – |" in text
    assert list(section.remarks()) == ["Slower than the plain GRU (2, 4, 3): backprop (1.50×), backprop, lean (1.25×)."]
    top, bottom = Figure().subplots(2)
    section.draw(top, bottom)
    lines = {line.get_label(): list(line.get_xydata().flatten()) for line in top.get_lines()}
    assert lines["highway_bp k=0"] == [4, 0.5, 8, 0.25]
    assert PART.section({}, "cpu") is None
