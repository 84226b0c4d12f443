"""What a report's rows depend on is in the report: model, optimizer, rate, batches, sizes, engines' defaults."""

from dataclasses import fields, replace

import pytest
from report_records import RECORDS, section_of, told
from tiny_suite import PLAIN, TASK, TUNED, fake, training

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.facts import select
from gradfree.benchmarks.tasks.schedules import AdamTask, ConstantSGDTask
from gradfree.benchmarks.training.comparison import Comparison

DEFAULT = Row("highway_bp", "highway_bp", {})


def as_fields(task):
    return {field.name: getattr(task, field.name) for field in fields(task)}


def test_a_record_has_sizes_and_defaults_and_the_section_tells_them():
    """With the two sweeps that a row without options has."""
    case = training(DEFAULT)
    results = case.run()
    assert results["sizes"] == {"parameters": 1249, "train": 16, "validation": 16, "test": 16}
    assert results["defaults"] == "iterations=2, gamma=0.0"
    section = section_of(Comparison(TASK, (PLAIN, DEFAULT)), dict([fake(case, results)]))
    assert section.setup == (
        "Trained: residual_mlp(in_features=4, num_classes=1, depth=4, width=8), 1,249 parameters, by AdamW(betas=(0.9, "
        "0.999), weight_decay=0.01) at 0.01, warmed up for a tenth of the steps, then annealed; 8 of 16 examples a "
        "batch; validated on 16, tested on 16. Options that rows do not name: highway_bp(iterations=2, gamma=0.0)."
    )
    assert told(section, metric="parameters")[0] == 1249
    assert told(section, metric="batch size")[0] == 8


def test_what_old_records_do_not_have_is_left_out():
    section = section_of(Comparison(TASK, (PLAIN,)), RECORDS)
    assert "parameters" not in section.setup
    assert "; 8 examples a batch." in section.setup


def test_recorded_defaults_count_and_not_those_of_now():
    case = training(DEFAULT)
    found = {"losses": [], "fidelity": [], "validation": 1.0, "test": 1.0, "defaults": "iterations=7"}
    section = section_of(Comparison(TASK, (PLAIN, DEFAULT)), dict([fake(case, found)]))
    assert section.setup.endswith("Options that rows do not name: highway_bp(iterations=7).")


def test_with_several_rates_none_is_that_of_all_rows():
    trials = {case.id: fake(case, {"losses": [], "validation": 1.0})[1] for case in TUNED.trials("cpu")}
    runs = [fake(case, {"losses": [], "fidelity": [], "test": 1.0}) for case in TUNED.training(0, "cpu", trials)]
    section = section_of(TUNED, trials | dict(runs))
    assert " at the row's rate, " in section.setup
    assert select(section.facts, metric="learning rate of all rows").is_empty()


@pytest.mark.parametrize(
    ("task", "optimizer", "course"),
    [
        (TASK, "AdamW(betas=(0.9, 0.999), weight_decay=0.01)", "warmed up for a tenth of the steps, then annealed"),
        (ConstantSGDTask(**as_fields(TASK), momentum=0.0), "SGD", "throughout"),
        (
            AdamTask(**as_fields(TASK), weight_decay=0.1, max_norm=0.5),
            "Adam(betas=(0.9, 0.999), weight_decay=0.1) on gradients cut to a norm of 0.5",
            "warmed up for a tenth of the steps, then a cosine down to a tenth",
        ),
    ],
)
def test_optimizers_are_told_with_their_settings(task, optimizer, course):
    assert (task.optimizer, task.course) == (optimizer, course)


def test_loss_curves_have_a_line_for_each_run():
    """By the number of the step; runs that diverged end where they did."""
    comparison = Comparison(replace(TASK, steps=5), (PLAIN, DEFAULT))
    losses = [[2.0, 1.0, 0.5], [3.0, 2.0, float("inf")]]
    made = [
        fake(
            training(PLAIN, task=comparison.task, seed=seed),
            {
                "losses": [{"step": 2 * n, "loss": loss} for n, loss in enumerate(course)],
                "fidelity": [],
                "validation": 1.0,
                "test": 1.0,
            },
        )
        for seed, course in enumerate(losses)
    ]
    chart = section_of(comparison, dict(made)).charts[-1]
    assert chart.title == "points, 5 steps, cpu: training loss"
    assert chart.points.select("line", "x", "y").rows() == [
        ("autograd, seed 0", 0.0, 2.0),
        ("autograd, seed 0", 2.0, 1.0),
        ("autograd, seed 0", 4.0, 0.5),
        ("autograd, seed 1", 0.0, 3.0),
        ("autograd, seed 1", 2.0, 2.0),
    ]
