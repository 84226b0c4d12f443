"""Timings of layers on long sequences: pass by pass, with the sweeps of engines, and a loop where it is short."""

import pytest
from report_records import section_of

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import measure
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.timing.recurrent_layers import LayerPass, LongLayerTimings, RecurrentLayer

ROWS = (Row("backprop", "backprop", {}), Row("shooting", "shooting", {"segments": 4, "max_sweeps": 3}))
LAYERS = (
    RecurrentLayer("GRU", 1, 64, 4),
    RecurrentLayer("GRU", 1, 64, 4, dtype="bfloat16"),
    RecurrentLayer("LSTM", 2, 64, 4, batch_first=False),
)
PART = LongLayerTimings(LAYERS, ROWS, threads=1, compiled_up_to=32)


@pytest.mark.slow
def test_a_report_tells_times_and_sweeps():
    records = {case.id: measure(case) for case in PART.timing("cpu")}
    rows = [record["results"]["rows"] for record in records.values()]
    assert all([row["label"] for row in own] == ["plain", "backprop", "shooting"] for own in rows)
    assert all("sweeps" in own[2]["figures"] and not own[0]["figures"] for own in rows)
    section = section_of(PART, records)
    assert section.title == "recurrent layers, 64 to 64 steps, device: cpu, threads: 1"
    assert [row[0].text for row in section.rows] == list(map(str, LAYERS))
    assert section.remarks[0].startswith(
        "Sweeps of shooting behind the first run, forward and backward: GRU (1, 64, 4) "
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_a_pass_is_of_the_layers_precision_and_layout(layer):
    (case,) = LongLayerTimings((layer,), ROWS).timing("cpu")
    step = LayerPass(case, ROWS[0])
    assert str(step.run().dtype) == f"torch.{layer.dtype}"
    assert step.module.batch_first == layer.batch_first
    assert step.x.shape[not layer.batch_first] == layer.batch


def test_a_loop_is_compiled_where_it_is_short():
    short, half = RecurrentLayer("GRU", 1, 32, 4), RecurrentLayer("GRU", 1, 32, 4, dtype="bfloat16")
    part = LongLayerTimings((short, half, *LAYERS), ROWS, compiled_up_to=32)
    assert ["compiled loop" in case.steps() for case in part.timing("cpu")] == [True, False, False, False, False]


def test_the_suite_for_a_gpu_begins_with_the_shortest_and_fits_into_its_memory():
    cases = [case for part in SUITES["gpu-time"] for case in part.timing("cuda")]
    layers = [case.layer for case in cases]
    assert [layer.steps for layer in layers] == sorted(layer.steps for layer in layers)
    assert {layer.steps for layer in layers} == {1024, 4096, 16384, 65536}
    assert {layer.units for layer in layers} == {64, 256, 1024}
    assert {layer.batch for layer in layers} == {1, 8, 64}
    assert max(layer.batch * layer.steps * layer.units for layer in layers) == 2**28
    assert [case.compiled for case in cases] == [layer.steps == 1024 and layer.dtype == "float32" for layer in layers]
    assert all(("backprop" in case.steps()) == (case.layer.steps < 65536) for case in cases)
