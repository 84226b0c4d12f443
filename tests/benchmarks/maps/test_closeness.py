"""Closeness on trained nets: cosines of cotangents and gradients, exact where theory says so, beside the time."""

import pytest
import torch
from report_records import section_of
from tiny_suite import TASK

from gradfree.benchmarks.maps.closeness import Closeness
from gradfree.benchmarks.records.records import measure
from gradfree.benchmarks.suites.depth import segments
from gradfree.benchmarks.suites.rows import iterated

ROWS = (*iterated("highway_bp", 0, 3), *(segments(2, k) for k in (0, 1)))
PART = Closeness((TASK,), ROWS, threads=1)


@pytest.fixture(scope="module")
def record():
    torch.set_default_dtype(torch.float32)
    (case,) = PART.timing("cpu")
    return {case.id: measure(case)}


@pytest.mark.slow
def test_the_exact_are_exact_and_segments_closer_than_single_links(record):
    plain, k0, k3, cut0, cut1 = next(iter(record.values()))["results"]["rows"]
    assert "cotangents" not in plain
    for exact in (k3, cut1):
        assert exact["cotangents"] == exact["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert k0["cotangents"] < cut0["cotangents"] < 1 - 1e-5
    assert all(cost["peak_memory"] > 0 for cost in (plain, k0, k3, cut0, cut1))


def test_cotangents_are_those_of_states_as_autograd_keeps_them():
    torch.set_default_dtype(torch.float32)
    (case,) = PART.timing("cpu")
    model, batch = case._trained
    states = [torch.nn.Module.__call__(model.stem, batch.inputs.flatten(1))]
    for block in model.blocks:
        states.append(block(states[-1]))
        states[-1].retain_grad()
    TASK.loss(model.head(model.norm(states[-1])), batch.targets).backward()
    expected = torch.cat([state.grad.flatten() for state in states[1:]])
    torch.testing.assert_close(case._cotangents(), expected)


def test_a_report_says_where_single_links_stay_ahead_at_equal_time(record):
    (case,) = PART.timing("cpu")
    costs = record[case.id]["results"]["rows"]
    for cost, ratio in zip(costs, (1.0, 0.5, 1.5, 0.8, 1.2), strict=True):
        cost |= {"ratio": ratio, "ratio_quartiles": [ratio - 0.1, ratio + 0.1]}
    section = section_of(PART, record)
    assert section.title.startswith("points: residual_mlp(in_features=4, num_classes=1, depth=4, width=8), 7 steps")
    assert section.remarks[0] == (
        "In the time of single links some segments are at least as close, but for highway_bp k=0."
    )
    (chart,) = section.charts
    assert chart.points["x"].to_list() == [1.0, 0.5, 1.5, 0.8, 1.2][1:]
    assert set(chart.points["label"]) == {"highway_bp with k iterations", "highway_bp C=2 with k iterations"}
