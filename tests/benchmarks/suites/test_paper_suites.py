"""The suites from papers: their settings, and published figures and claims beside ours."""

import pytest
import torch
from report_records import markdown, section_of
from tiny_suite import SUITE, TASK, fake

from gradfree.benchmarks.reports.report import texts
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import cases
from gradfree.benchmarks.tables.published import Claim, Published, WithPublished
from gradfree.benchmarks.tasks.schedules import AdamTask
from gradfree.benchmarks.timing.recurrent_models import (
    LOOP,
)
from gradfree.benchmarks.timing.timed import Timings


@pytest.mark.parametrize("name", ["highway-bp-table6-small", "dsf-wikitext-small", "foton-depth-small"])
def test_published_figures_belong_to_existing_rows_and_columns(name):
    for beside in (part for part in SUITES[name] if isinstance(part, WithPublished)):
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
    """Return the section with a paper's figures, for these test scores by row and seed."""
    records = {}
    for case in cases(SUITE, 3, "cpu", {}):
        if case.kind == "training":
            score = scores[case.row.label][case.seed]
            name, record = fake(case, {"losses": [], "fidelity": [], "validation": score, "test": score})
            record["environment"] |= {"cpus": 2, "platform": "Linux", "torch": "2.13"}
            records[name] = record
    return section_of(WithPublished(SUITE[0], paper), records)


SCORES = {
    "backprop": (80.0, 81.0, 82.0),
    "backprop via chain": (80.0, 81.0, 82.0),
    "highway_bp k=1": (90.0, 91.0, 92.002),
}


def test_published_figures_are_shown_beside_ours():
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


def test_claims_of_a_paper_are_compared_with_our_figures():
    worse, better, unknown, _ = section(SCORES).remarks
    assert worse.startswith("The paper: backprop is worse. Ours, test accuracy (%): autograd 81.00 ±")
    assert worse.endswith("difference +10.00 ± 0.00, agrees.")
    assert better.endswith("difference -10.00 ± 0.00, disagrees.")
    assert unknown.endswith("foton –; not known.")


def rates(task, momentum=None):
    """Return the learning rate of each step as a share of the task's."""
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
