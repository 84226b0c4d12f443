"""Advice held against an exhaustive run: what is tried, in which order, and what the table tells of it."""

import pytest
import torch
from report_records import section_of, texts
from tiny_suite import fake

from gradfree.benchmarks.advice import regret
from gradfree.benchmarks.advice.contest import rows_to_try
from gradfree.benchmarks.advice.regret import KNOWN, Known, Regrets
from gradfree.benchmarks.timing.side_by_side import statistics


@pytest.mark.parametrize("name", KNOWN)
def test_something_can_be_tried_on_every_model(name):
    assert rows_to_try(KNOWN[name].build(), None)[1]


def test_what_is_exact_is_tried_first_and_first_settings_before_second_ones():
    _, rows = rows_to_try(torch.nn.GRU(2, 3), None)
    labels = [row.label for row in rows]
    assert labels[:3] == ["backprop (default)", "newton", "shooting"]
    assert labels.index("highway_bp k=0") < labels.index("truncated window=2") < labels.index("highway_bp k=1")
    assert labels[-1] == "deeppcr"


@pytest.mark.slow
def test_a_check_times_what_is_advised_and_all_that_has_the_same_gradient(monkeypatch):
    """And nothing that has another."""
    torch.set_default_dtype(torch.float32)
    tiny = Known(lambda: KNOWN["GRU, 32 of 64"].build(), (2, 6, 16))
    monkeypatch.setattr("gradfree.benchmarks.advice.regret.KNOWN", {"tiny": tiny})
    monkeypatch.setattr(regret, "_HOPELESS", 1e9)
    monkeypatch.setattr(regret, "_TURN", 0.0)
    (case,) = Regrets(("tiny",), threads=1, budget=1.0).timing("cpu")
    results = case.run()
    timed = [row["label"] for row in results["rows"]]
    assert {results["taken"], "backprop", "backprop (default)", "shooting", "truncated window=16"} <= set(timed)
    assert not {"truncated window=2", "dsf feedback=linspace"} & set(timed)


def test_the_regret_is_what_a_step_takes_longer_than_with_the_fastest():
    part = Regrets(("GRU, 32 of 64", "64 dense layers"), threads=1)
    times = {"backprop": [4.0] * 9, "newton": [3.0] * 9, "shooting": [2.0] * 9}
    rows = [{"label": label, **statistics(own, times["backprop"])} for label, own in times.items()]
    records = dict(
        fake(case, {"taken": taken, "words": "", "spent": 9.0, "untried": [], "rows": rows})
        for case, taken in zip(part.timing("cpu"), ("shooting", "newton"), strict=True)
    )
    section = section_of(part, records)
    assert texts(section) == [
        ["GRU, 32 of 64", "shooting", "0.50", "shooting", "0.50", "0 [0–0]", "9"],
        ["64 dense layers", "newton", "0.75", "shooting", "0.50", "50 [50–50]", "9"],
    ]
    assert section.remarks == ["Within 10 % of the fastest on 1 of 2 models, not on 64 dense layers (50 %)."]
