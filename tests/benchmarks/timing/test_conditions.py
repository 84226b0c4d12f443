"""The suite "conditions": its report names each condition under which a layer is slower than torch's by over 5 %."""

import pytest
import torch
from report_records import TRACEBACK, rounds, section_of
from tiny_suite import fake

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.timing.conditions import CONDITIONS, Condition, ConditionPass, conditions
from gradfree.benchmarks.timing.timed import Timing, Timings

(SUITE,) = SUITES["conditions"]
SHOOTING = Row("shooting", "shooting", {})
USUAL, CAST, BOTH = Condition("GRU"), Condition("LSTM", autocast="bfloat16"), Condition("GRU", directions=2)


def section(ratios):
    """Return the section on made-up records with these ratios by condition; ``None`` is an error."""
    suite = Timings(conditions, tuple(ratios), (SHOOTING,), threads=1)
    records = {}
    for case in suite.timing("cpu"):
        ratio = ratios[case.item]
        own = {"label": "shooting", "error": TRACEBACK} if ratio is None else rounds("shooting", ratio, 1)
        plain = {**rounds("plain", 1.0, 1), "ratio_quartiles": [1.0, 1.0]}
        records |= dict([fake(case, {"rows": [plain, own]})])
    return section_of(suite, records)


def test_the_report_names_what_is_beyond_five_percent_slowest_first():
    (said, *_) = section({USUAL: 1.06, CAST: 2.8, BOTH: 1.05}).remarks
    slow = "shooting on LSTM, autocast bfloat16 (2.80×); shooting on GRU (1.06×)"
    assert said == f"More than 1.05× plain's time: {slow}."


def test_the_report_says_that_nothing_is_slower_and_what_did_not_run():
    found = section({USUAL: 0.7, CAST: 1.05, BOTH: None}).remarks
    assert found[0] == "Nothing takes more than 1.05× plain's time."
    assert any("GRU, directions 2, shooting did not run" in remark for remark in found)


def test_the_suite_has_each_condition_for_each_cell():
    for cell in ("GRU", "LSTM", "RNN"):
        own = [condition for condition in CONDITIONS if condition.cell == cell]
        assert {c.dtype for c in own} == {"float32", "float64", "bfloat16", "float16"}
        assert {"", "bfloat16"} <= {c.autocast for c in own}
        assert {c.directions for c in own} == {c.layers for c in own} == {1, 2}
        assert {c.frozen for c in own} == {"", "recurrent", "all"}
        assert {c.norm for c in own} == {c.batch_first for c in own} == {False, True}
    assert {c.projection for c in CONDITIONS} == {0, 64}
    assert SUITE.subjects == CONDITIONS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_the_layer_is_under_its_condition(condition):
    step = ConditionPass(Timing(timed=conditions, item=condition, device="cpu", seed=0))
    trained = {name for name, parameter in step.module.named_parameters() if parameter.requires_grad}
    assert not trained if condition.frozen == "all" else any("weight_ih" in name for name in trained)
    assert any("_hh_" in name for name in trained) == (condition.frozen == "")
    assert {p.dtype for p in step.module.parameters()} == {step.x.dtype} == {getattr(torch, condition.dtype)}
    assert step.module.bidirectional == (condition.directions == 2)
    assert (step.module.num_layers, step.module.proj_size) == (condition.layers, condition.projection)
    assert hasattr(step.module, "weight_hh_l0_orig") == condition.norm
