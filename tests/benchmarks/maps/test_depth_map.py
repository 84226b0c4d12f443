"""The map of depth: shares of backpropagation's time by depth, with memory, gradients and the border."""

import math

import pytest
from report_records import rounds, section_of
from tiny_suite import fake
from torch import nn

from gradfree.benchmarks.maps.depth_map import BY_BLOCK, COMPILED, GRAPHED, PLAIN, DepthMap, border
from gradfree.benchmarks.records.records import measure
from gradfree.benchmarks.suites.depth import gpt, mlp, resnet, segments, vit
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.suites.rows import iterated

ROWS = (*iterated("highway_bp", 3), segments(2, 1))


@pytest.mark.slow
def test_a_report_tells_shares_memory_and_how_close_gradients_are():
    """k = L - 1, and C - 1 with segments, are exact: the cosine says so."""
    part = DepthMap((mlp(4, 8, 2), mlp(3, 8, 2)), ROWS, threads=1, title="residual MLPs")
    records = {case.id: measure(case) for case in part.timing("cpu")}
    rows = [record["results"]["rows"] for record in records.values()]
    assert all([row["label"] for row in own] == [PLAIN, "highway_bp k=3", "highway_bp C=2 k=1"] for own in rows)
    assert all(row["cosine"] == pytest.approx(1.0, abs=1e-5) and row["peak_memory"] > 0 for own in rows for row in own)
    section = section_of(part, records)
    assert section.title == "residual MLPs, device: cpu, threads: 1"
    assert [row[0].text for row in section.rows] == [str(net) for net in part.subjects]
    assert [chart.rules for chart in section.charts] == [{"the border": 1.0}] * 2
    assert section.charts[0].points["x"].to_list() == [4.0, 3.0]
    assert set(section.charts[0].points["label"]) == {"residual MLP of width 8, batch 2"}


@pytest.mark.parametrize("net", [gpt(2, 16, 1), vit(2, 16, 2), resnet(14, 2)])
def test_other_nets_run_too(net):
    (case,) = DepthMap((net,), iterated("highway_bp", 1), threads=1).timing("cpu")
    passes = case.steps()["highway_bp k=1"]()
    assert passes.gradient().isfinite().all()
    assert net.depth == len(passes.model.get_submodule("blocks" if net.model == "preact_resnet" else "sublayers"))


def test_shallow_nets_are_compiled_too(monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    part = DepthMap((mlp(4, 8, 2), mlp(3, 8, 2)), ROWS, compiled_up_to=3)
    assert [COMPILED in case.steps() for case in part.timing("cpu")] == [False, True]
    (*_, case) = part.timing("cpu")
    whole, by_block = (case.steps()[label]().model for label in (COMPILED, BY_BLOCK))
    assert compiled == [whole, *by_block.blocks]
    assert len(compiled) == 4
    assert {"depth-map", "gpu-depth"} <= SUITES.keys()


def test_a_gpu_has_cuda_graphs_beside_and_every_family_three_batches():
    part, compiled = SUITES["gpu-depth"]
    (case, *_) = compiled.timing("cuda")
    assert [*case.steps()][:4] == [PLAIN, COMPILED, BY_BLOCK, GRAPHED]
    assert all([*case.steps()][:2] == [PLAIN, GRAPHED] for case in part.timing("cuda"))
    assert {net.model: net.batch for net in part.subjects if net.batch == 256}.keys() == {
        "residual_mlp",
        "gpt",
        "vit",
        "preact_resnet",
    }


def test_the_border_lies_where_the_share_last_falls_below_one():
    assert border([(16, 2.0), (64, 0.5), (256, 0.4)]) == pytest.approx(32)
    assert border([(16, 0.9), (64, 1.1), (256, 0.9)]) == pytest.approx(64 * 4 ** (math.log(1.1) / math.log(1.1 / 0.9)))
    assert border([(16, 0.9), (64, 0.8)]) == 16
    assert border([(16, 0.9), (64, 1.2)]) is None


def test_a_verdict_tells_what_pays_beside_compiled_backprop_too():
    part = DepthMap((mlp(4, 8, 2),), ROWS, threads=1, compiled_up_to=4)
    (case,) = part.timing("cpu")
    shares = {PLAIN: 1.0, COMPILED: 0.7, "highway_bp k=3": 0.6, "highway_bp C=2 k=1": 0.9}
    rows = [rounds(label, share, 4) for label, share in shares.items()]
    section = section_of(part, dict([fake(case, {"rows": rows})]))
    assert section.verdicts == [
        "pays: highway_bp k=3 (0.60), highway_bp C=2 k=1 (0.90); beside compiled backprop (0.70) highway_bp k=3"
    ]
    assert section.remarks[0] == (
        "highway_bp k=3 takes less time than eager backprop from 4 (residual MLP of width 8, batch 2) blocks on."
    )
