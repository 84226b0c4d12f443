"""Phases of a training step, and activation memory by depth."""

from itertools import pairwise

import pytest
import torch
from report_records import chart, failed, lines, markdown, section_of, told
from tiny_suite import fake
from torch.utils._python_dispatch import TorchDispatchMode

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing import layer_steps as costs
from gradfree.benchmarks.timing.layer_steps import Network, StepCosts

PLAIN = Row("backprop", "backprop", {"plain": True})
FOTON = Row("foton", "foton", {})
STREAMING = Row("foton streaming", "foton", {"streaming": True})
PART = StepCosts(
    subjects=(Network(depth=3, width=16, batch=8),),
    small=Network(depth=0, width=16, batch=512),
    depths=(4, 8, 16),
    rows=(PLAIN, FOTON, STREAMING),
    threads=1,
)
MIB = 2**20


@pytest.fixture(autouse=True)
def float32():
    torch.set_default_dtype(torch.float32)


class Operations(TorchDispatchMode):
    """A clock that every operation of torch advances, however busy the machine."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_phases_make_the_step(monkeypatch):
    step, *_ = PART.timing("cpu")
    with Operations() as clock:
        monkeypatch.setattr(costs, "now", lambda device: clock.count)
        plain, foton, streaming = step.run()["rows"]
    assert plain["ratio"] == 1.0
    for row in plain, foton, streaming:
        assert len(row["times"]) == 9
        assert sum(row["phases"]) == row["time"]
    # Nothing but the engine's retraction comes behind the update.
    assert plain["phases"][2] < foton["phases"][2] == streaming["phases"][2]
    assert plain["phases"][1] == foton["phases"][1]
    assert foton["phases"][0] < streaming["phases"][0]


@pytest.mark.slow
def test_activation_memory_grows_with_depth_unless_it_is_streamed():
    """Weights count for next to nothing, so memory is proportional to depth or constant."""
    _, *measured = PART.timing("cpu")
    plain, foton, streaming = (case.run()["activations"] for case in measured)
    for smaller, larger in pairwise(plain):
        assert larger == pytest.approx(2 * smaller, rel=0.2)
    assert foton[-1] > 1.5 * foton[1]
    assert streaming[-1] == pytest.approx(streaming[0], rel=0.1)


def fakes():
    step, *measured = PART.timing("cpu")
    phases = {
        "backprop": [0.001, 0.0015, 0.0005],
        "foton": [0.002, 0.002, 0.001],
        "foton streaming": [0.003, 0.002, 0.0],
    }
    rows = [
        {
            "label": label,
            "phases": own,
            "time": sum(own),
            "time_quartiles": [sum(own), sum(own)],
            "ratio": sum(own) / 0.003,
            "ratio_quartiles": [sum(own) / 0.004, sum(own) / 0.002],
        }
        for label, own in phases.items()
    ]
    memory = {"backprop": [MIB, 2 * MIB, 4 * MIB], "foton": [2 * MIB, 4 * MIB, 8 * MIB], "foton streaming": [MIB] * 3}
    return dict([fake(step, {"rows": rows}), *(fake(c, {"activations": memory[c.row.label]}) for c in measured)])


def test_the_section_shows_phases_and_memory():
    section = section_of(PART, fakes())
    text = markdown(section)
    assert "| foton | 2.0 | 2.0 | 1.0 | 1.67 | 1.25–2.50 | 2.0 | 4.0 | 8.0 |" in text
    assert section.remarks == [
        "Retraction's share of a step: foton 20 %, foton streaming 0 %.",
        "Activation memory at depth 16 as a multiple of that at depth 4: backprop 4.00, foton 4.00, "
        "foton streaming 1.00.",
    ]
    assert section.verdicts[1] == "1.67× slower than backprop"
    assert "| backprop | 1.0 | 1.5 | – | 1.00 |" in text
    assert "–: the engine retracts nothing; other rows' hooks, 0.5 ms at most, are in its step." in section.legend
    assert lines(chart(section, "memory against depth"))["foton"] == [[4, 2], [8, 4], [16, 8]]
    assert told(section, row="foton", setting="8 layers of 16, batch 512", metric="peak activation memory")[0] == 4
    assert told(section, row="foton", setting="3 layers of 16, batch 8", metric="time of retraction")[0] == 0.001
    assert section.facts.filter(row="backprop", metric="time of retraction").is_empty()


def test_memory_that_was_not_measured_or_failed_is_left_open():
    assert section_of(PART, {}) is None
    *_, last = PART.timing("cpu")
    for records in dict(list(fakes().items())[:-1]), fakes() | dict([failed(last)]):
        section = section_of(PART, records)
        assert "| foton streaming | 3.0 | 2.0 | 0.0 | 1.67 | 1.25–2.50 | – | – | – |" in markdown(section)
        assert "foton streaming" not in next(told for told in section.remarks if told.startswith("Activation memory"))
        assert lines(chart(section, "memory against depth")).keys() == {"backprop", "foton"}
