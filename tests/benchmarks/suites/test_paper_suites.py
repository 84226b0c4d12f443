"""The suites after papers: loops compute what fused layers do, settings are the papers', figures stand beside ours."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from report_records import chart, lines, markdown, rounds, section_of, texts
from tiny_suite import SUITE, TASK, fake

from gradfree import create_model
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import cases
from gradfree.benchmarks.tables.published import Beside, Claim, Published
from gradfree.benchmarks.tasks.schedules import AdamTask, ConstantSGDTask
from gradfree.benchmarks.timing.recurrent_layers import CellLoop, replace_layers
from gradfree.benchmarks.timing.recurrent_models import (
    COMPILED,
    FUSED,
    LOOP,
    RecurrentNet,
    recurrent_steps,
)
from gradfree.benchmarks.timing.timed import Timings

ROWS = (Row("backprop", "backprop", {}), Row("highway_bp k=1", "highway_bp", {"iterations": 1}))
NET = RecurrentNet(
    "GRU", "recurrent_lm", {"vocab_size": 5, "cell": "gru", "layers": 1, "width": 4}, batch=2, example=(6,), classes=5
)
STEPS = Timings(recurrent_steps, (NET,), ROWS, threads=1)


@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn"])
def test_a_loop_over_cells_computes_what_the_fused_layer_does(cell):
    model = create_model("recurrent_lm", vocab_size=5, cell=cell, layers=2, width=4)
    tokens = torch.randint(5, (2, 6))
    logits, states = model.unroll(tokens)
    again, _ = model.unroll(tokens, states)
    gradients = torch.autograd.grad(again.sin().sum(), model.parameters())
    replace_layers(model, partial(CellLoop, compiled=False))
    assert not [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)]
    own, own_states = model.unroll(tokens)
    torch.testing.assert_close((own, own_states), (logits, states))
    own_again, _ = model.unroll(tokens, own_states)
    torch.testing.assert_close(own_again, again)
    own_gradients = torch.autograd.grad(own_again.sin().sum(), model.parameters())
    assert sorted(g.norm().item() for g in own_gradients) == pytest.approx(sorted(g.norm().item() for g in gradients))


def test_a_loop_that_cannot_be_compiled_costs_its_own_row_alone(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", lambda cell: setattr(cell, "forward", refuse) or cell)
    (case,) = STEPS.timing("cpu")
    results = case.run()
    assert [row["label"] for row in results["rows"]] == [FUSED, LOOP, COMPILED, "backprop", "highway_bp k=1"]
    section = section_of(STEPS, json.loads(json.dumps(dict([fake(case, results)]))))
    assert any(told.startswith(f"GRU, {COMPILED} did not run: ") for told in section.remarks)
    rows = texts(section)
    assert section.head == ["row", "GRU (ms)", "GRU (× faster)"]
    assert [row[0] for row in rows] == [FUSED, LOOP, COMPILED, "backprop", "highway_bp k=1"]
    assert rows[1][2] == "1.00"
    assert rows[2][1:] == ["–", "–"]


@pytest.mark.slow
def test_a_compiled_loop_is_timed():
    """And compiled: torch's own modules may be left as they are without a word."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (case,) = STEPS.timing("cpu")
    results = replace(case, rows=()).run()
    assert [row["label"] for row in results["rows"]] == [FUSED, LOOP, COMPILED]
    assert not [row for row in results["rows"] if "error" in row]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", ["highway-bp-table6-small", "dsf-wikitext-small", "foton-depth-small"])
def test_a_papers_figures_stand_beside_rows_and_columns_that_there_are(name):
    """Otherwise they would be shown nowhere."""
    for beside in (part for part in SUITES[name] if isinstance(part, Beside)):
        assert beside.experiment in SUITES[name]
        labels = {row.name for row in beside.experiment.rows} | {LOOP}
        named = [row for claim in beside.published.claims for row in claim.ascending]
        figures = beside.published.figures
        if isinstance(beside.experiment, Timings):
            known = {n for net in beside.experiment.subjects for n in (f"{net.label} (ms)", f"{net.label} (× faster)")}
            assert set(beside.published.columns) <= known
        assert labels >= set(named)
        assert {claim.column for claim in beside.published.claims} <= set(beside.published.columns)
        assert labels & figures.keys() or not figures
        assert beside.published.claims or figures


PAPER = Published(
    source="a paper, Table 1",
    hardware="an abacus",
    columns=("test accuracy (%)",),
    figures={"highway_bp k=1": {"test accuracy (%)": 91.5}},
    claims=(
        Claim("backprop is worse", "test accuracy (%)", ("autograd", "highway_bp k=1")),
        Claim("backprop is better", "test accuracy (%)", ("highway_bp k=1", "autograd")),
        Claim("a third one is best", "test accuracy (%)", ("autograd", "foton")),
    ),
    differs=("fewer points",),
)


def section(scores, paper=PAPER):
    """What is shown beside a paper's figures for test scores by row and seed."""
    records = {}
    for case in cases(SUITE, 3, "cpu", {}):
        if case.kind == "training":
            score = scores[case.row.label][case.seed]
            name, record = fake(case, {"losses": [], "fidelity": [], "validation": score, "test": score})
            record["environment"] |= {"cpus": 2, "platform": "Linux", "torch": "2.13"}
            records[name] = record
    return section_of(Beside(SUITE[0], paper), records)


SCORES = {
    "backprop": (80.0, 81.0, 82.0),
    "backprop via chain": (80.0, 81.0, 82.0),
    "highway_bp k=1": (90.0, 91.0, 92.002),
}


def test_a_papers_figures_stand_beside_ours():
    found = section(SCORES)
    plain, _, highway = texts(found)
    assert found.head == ["engine", "test accuracy (%)", "test accuracy (%), paper"]
    assert plain[1].startswith("81.00 ±")
    assert plain[2] == "–"
    assert highway[1].startswith("91.00 ±")
    assert highway[2] == "91.5"
    text = markdown(found)
    assert "Ours: cpu, 2 CPU cores, Linux, torch 2.13. The paper's: an abacus." in text
    assert "- Not as in the paper: fewer points." in text


def test_what_a_paper_says_is_held_against_ours():
    worse, better, unknown, _ = section(SCORES).remarks
    assert worse.startswith("The paper: backprop is worse. Ours, test accuracy (%): autograd 81.00 ±")
    assert worse.endswith("difference +10.00 ± 0.00, agrees.")
    assert better.endswith("difference -10.00 ± 0.00, disagrees.")
    assert unknown.endswith("foton –; not known.")


def test_an_order_is_told_from_differences_seed_by_seed():
    """Seeds that are good for one row are good for the other: what they have in common is no doubt about the order."""
    agrees, *_ = section({**SCORES, "highway_bp k=1": (80.5, 81.4, 82.6)}).remarks
    assert agrees.endswith("difference +0.50 ± 0.25, agrees.")
    same, *_ = section({**SCORES, "highway_bp k=1": (80.5, 81.0, 82.5)}).remarks
    assert same.endswith("difference +0.33 ± 0.72, too close to tell.")


def test_a_papers_figures_are_drawn_against_ours():
    found = chart(section(SCORES), "a paper, Table 1: test accuracy (%)")
    assert lines(found) == {
        "ours": [[pytest.approx(91.0, abs=1e-3), "highway_bp k=1"]],
        "the paper's": [[91.5, "highway_bp k=1"]],
    }
    assert (found.x.title, found.y.title) == ("test accuracy (%)", "engine")
    assert found.points["x_low"].to_list()[0] == pytest.approx(91.0 - 2.48, abs=0.01)


def test_a_papers_figures_are_facts_of_its_own():
    """So that exports tell whose a number is, and no mean of ours takes it in."""
    facts = section(SCORES).facts
    theirs = facts.filter(source="a paper, Table 1")
    assert theirs.select("row", "metric", "value").rows() == [("highway_bp k=1", "test accuracy", 91.5)]


def test_a_figure_whose_column_has_no_unit_has_it_on_its_axis():
    unnamed = replace(
        PAPER, quantity="angle (°):", columns=("cosine",), figures={"autograd": {"cosine": 1.0}}, claims=()
    )
    assert chart(section(SCORES, unnamed), "a paper, Table 1: cosine").x.title == "angle (°): cosine"


def timed_steps(rows):
    """The section of a model whose fused layer takes 1 ms, a loop 2 ms, and rows 3, 4 and more."""
    part = replace(STEPS, rows=rows)
    (case,) = part.timing("cpu")
    labels = (FUSED, LOOP, *(row.label for row in rows))
    timings = [rounds(label, 0.1 * n, 1) for n, label in enumerate(labels, 1)]
    return section_of(part, dict([fake(case, {"rows": timings, "errors": {}})]))


def test_gains_are_over_the_loop():
    fused, loop, _, highway = texts(timed_steps(ROWS))
    assert (fused, loop) == ([FUSED, "1.0", "2.00"], [LOOP, "2.0", "1.00"])
    assert highway == ["highway_bp k=1", "4.0", "0.50"]


def rates(task, momentum=None):
    """The learning rate at each step, as a share of the task's."""
    optimizer, schedule = task.create_optimizer(torch.nn.Linear(1, 1))
    found = []
    for _ in range(task.steps):
        found.append(optimizer.param_groups[0]["lr"] / task.learning_rate)
        optimizer.step()
        schedule.step()
    return found


def as_(kind, **settings):
    return kind(**{**vars(TASK), "steps": 30, **settings})


def test_the_rate_rises_for_a_tenth_and_falls_to_a_tenth():
    found = rates(as_(AdamTask))
    assert found[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[16] == pytest.approx(0.55, abs=0.05)
    assert found[-1] == pytest.approx(0.1, abs=0.01)


def test_the_rate_stays():
    assert rates(as_(ConstantSGDTask, momentum=0.9)) == [1.0] * 30


def test_gradients_are_cut_to_a_norm_and_weights_decay():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer, _ = as_(AdamTask, max_norm=1.0, weight_decay=0.25).create_optimizer(model)
    model.weight.grad = torch.tensor([[30.0, 40.0]])
    optimizer.step()
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]))
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
