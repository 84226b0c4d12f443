"""Steps of Lightning's Trainer, strategy by strategy."""

import pytest
import torch
from report_records import chart, lines, markdown, section_of
from tiny_suite import CHAIN, HIGHWAY, TASK, fake

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.strategies import StrategyTiming, StrategyTimings

PART = StrategyTimings((TASK,), (Row("backprop", "backprop", {}), CHAIN, HIGHWAY))


@pytest.mark.slow
def test_every_strategy_is_timed_in_every_round(monkeypatch, capfd):
    """Quietly: Lightning would tell of its devices at each of the fits."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(StrategyTiming, "rounds", 2)
    (case,) = PART.timing("cpu")
    rows = case.run()["rows"]
    assert [row["label"] for row in rows] == ["auto", "backprop", "backprop via chain", "highway_bp k=1"]
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        assert len(row["times"]) == 2
        assert all(0 < time < 1 for time in row["times"])
    assert capfd.readouterr().err == ""


def test_the_section_tells_what_costs_no_more_than_lightnings_own():
    assert section_of(PART, {}) is None
    ratios = {"auto": 1.0, "backprop": 1.029, "backprop via chain": 1.031, "highway_bp k=1": 0.5}
    rows = [
        {
            "label": label,
            "times": [0.002 * r, 0.002],
            "time": 0.002 * r,
            "time_quartiles": [0.001 * r, 0.003 * r],
            "ratio": r,
            "ratio_quartiles": [r - 0.1, r + 0.2],
        }
        for label, r in ratios.items()
    ]
    (case,) = PART.timing("cpu")
    section = section_of(PART, dict([fake(case, {"rows": rows})]))
    assert "| backprop via chain | 2.06 | 1.031 [0.931, 1.231] |" in markdown(section)
    assert section.verdicts == [
        "the baseline",
        "no difference in speed from auto seen",
        "no difference in speed from auto seen",
        "2.00× faster than auto",
    ]
    assert section.remarks == ["Within 3 % of Lightning's own step: backprop."]
    drawn = lines(chart(section, "points, cpu"))
    assert [place for line in drawn.values() for place in line] == [[label, ratio] for label, ratio in ratios.items()]
