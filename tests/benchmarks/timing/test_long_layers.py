"""Timings of layers on long sequences: pass by pass, with the sweeps of engines, and a loop where it is short."""

import pytest
import torch
from report_records import section_of
from torch import nn

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import measure
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.timing.recurrent_layers import InPieces, LayerPass, LongLayerTimings, RecurrentLayer

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


def test_the_suite_for_a_gpu_has_torchs_layer_beside_every_engine():
    cases = [case for part in SUITES["gpu-time"] for case in part.timing("cuda")]
    assert all(next(iter(case.steps())) == "plain" for case in cases)
    assert max(case.layer.steps for case in cases) > 65536


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_in_pieces_has_the_outputs_and_gradients_of_the_whole(monkeypatch, batch_first):
    monkeypatch.setattr(InPieces, "most", 5)
    layer = nn.GRU(3, 4, batch_first=batch_first)
    x = torch.randn(13, 13, 3)
    found = []
    for module in (layer, InPieces(layer)):
        out, state = module(x)
        grads = torch.autograd.grad(out.square().sum() + state.sum(), tuple(layer.parameters()))
        found.append([out, state, *grads])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*found, strict=True))
