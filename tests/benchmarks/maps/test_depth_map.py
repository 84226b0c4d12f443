"""The map of depth: shares of backpropagation's time by depth, with memory, gradients and the border."""

import pytest
from report_records import section_of

from gradfree.benchmarks.maps.deep_steps import COMPILED, PLAIN
from gradfree.benchmarks.maps.depth_map import DepthMap
from gradfree.benchmarks.records.records import measure
from gradfree.benchmarks.suites.depth import gpt, mlp, resnet, segments
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.suites.rows import iterated

ROWS = (*iterated("highway_bp", 3), segments(2, 1))


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


@pytest.mark.parametrize("net", [gpt(2, 16, 1), resnet(14, 2)])
def test_other_nets_run_too(net):
    (case,) = DepthMap((net,), iterated("highway_bp", 1), threads=1).timing("cpu")
    passes = case.steps()["highway_bp k=1"]()
    assert passes.gradient().isfinite().all()
    assert net.depth == len(passes.model.get_submodule("sublayers" if net.tokens else "blocks"))


def test_shallow_nets_are_compiled_too():
    part = DepthMap((mlp(4, 8, 2), mlp(3, 8, 2)), ROWS, compiled_up_to=3)
    assert [COMPILED in case.steps() for case in part.timing("cpu")] == [False, True]
    assert {"depth-map", "gpu-depth"} <= SUITES.keys()
