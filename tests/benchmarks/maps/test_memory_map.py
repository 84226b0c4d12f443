"""The map of memory: checkpoints and engines by depth, time against peak memory, with the Pareto front."""

import pytest
import torch
from report_records import chart, section_of
from tiny_suite import fake

from gradfree.benchmarks.maps.memory_map import EACH, SEGMENTS, Checkpointed, MemoryMap
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.timing.layer_steps import Network

PLAIN = Row("backprop", "backprop", {"plain": True})
ROWS = (
    PLAIN,
    *(Checkpointed(kept, "backprop", {"plain": True}, kept) for kept in (EACH, SEGMENTS)),
    Checkpointed("orthogonal", "orthogonal_backprop", {}, SEGMENTS),
    Row("streaming", "foton", {"streaming": True}),
)
PART = MemoryMap(tuple(Network(depth, 8, 512) for depth in (4, 16)), ROWS, threads=1)


@pytest.mark.slow
def test_checkpoints_change_memory_and_no_gradient():
    """A block keeps its output and no more: a checkpoint of each spares nothing, one of several blocks does."""
    torch.set_default_dtype(torch.float32)
    _, case = PART.timing("cpu")
    trained = {label: build() for label, build in case.steps().items()}
    memory = {label: case.costs(trainee, [])["peak_memory"] for label, trainee in trained.items()}
    assert memory[SEGMENTS] < 0.7 * memory["backprop"] < 0.8 * memory[EACH]
    assert memory["streaming"] < 0.8 * memory["backprop"]
    expected = [p.detach() for p in trained["backprop"].optimizer.param_groups[0]["params"]]
    for label in (EACH, SEGMENTS):
        torch.testing.assert_close([p.detach() for p in trained[label].optimizer.param_groups[0]["params"]], expected)


def fakes(times, memory):
    rows = [
        {
            "label": row.label,
            **dict.fromkeys(("time", "ratio"), time),
            **{key: [0.9 * time, 1.1 * time] for key in ("time_quartiles", "ratio_quartiles")},
            "peak_memory": mib * 2**20,
        }
        for row, time, mib in zip(ROWS, times, memory, strict=True)
    ]
    return dict(fake(case, {"rows": rows}) for case in PART.timing("cpu"))


def test_the_section_has_a_column_and_a_chart_by_depth_and_says_who_is_on_the_front():
    """What takes more memory and is not shown to be faster is not on it."""
    section = section_of(PART, fakes(times=(1.0, 1.5, 1.4, 1.6, 1.35), memory=(9, 9.5, 3, 4, 2)))
    assert section.head[1:] == ["step at 4 (×)", "MiB at 4", "step at 16 (×)", "MiB at 16"]
    assert [cell.text for cell in section.rows[2]] == [SEGMENTS, "1.40", "3.0", "1.40", "3.0"]
    assert section.verdicts == [
        "on the Pareto front at 4, 16 layers",
        *["not on the Pareto front"] * 3,
        section.verdicts[0],
    ]
    assert section.remarks[0] == "Pareto front at 4 layers, the leanest first: streaming, backprop."
    drawn = chart(section, "16 layers of 8, batch 512, cpu, 1 threads")
    assert drawn.ringed
    assert drawn.points.filter("ringed")["row"].to_list() == ["backprop", "streaming"]
    assert drawn.points["x"].to_list() == [9, 9.5, 3, 4, 2]


def test_the_suite_has_what_a_user_would_pick_instead():
    (part,) = SUITES["forward-memory"]
    assert [network.depth for network in part.subjects] == [10, 100, 1000]
    assert len(list(part.timing("cpu"))) == 3
