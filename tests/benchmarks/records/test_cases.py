"""The results of cases, and ids that depend on all settings."""

from dataclasses import dataclass, field, fields, replace
from math import isnan

import pytest
import torch
from places import RESULTS
from tiny_suite import CHAIN, HIGHWAY, PLAIN, TASK, failing, training

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.records.case import ADDED, Row
from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import cases
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.benchmarks.training.comparison import Comparison, Trial


def test_progress_calls_the_baseline_autograd_and_ids_stay():
    case, trial = training(PLAIN), Trial(task=TASK, row=PLAIN, device="cpu")
    assert [str(case), str(trial)] == ["points autograd", f"points autograd at {TASK.learning_rate:g}"]
    assert case.id.startswith("training/points/backprop/cpu/")


def test_rows_differ_only_in_the_engine():
    plain, chain, highway = (training(row).run() for row in (PLAIN, CHAIN, HIGHWAY))
    # Without an engine there are no recorded cotangents.
    states = [state for probe in chain["fidelity"] for state in probe.pop("states")]
    assert all(cosine == ratio == 1 for _, cosine, ratio in states)
    assert chain == plain
    assert highway["losses"][0] == plain["losses"][0]
    assert highway["losses"] != plain["losses"]
    assert highway == training(HIGHWAY).run() != training(HIGHWAY, seed=1).run()


def test_sizes_and_default_options_are_recorded():
    results = training(Row("highway_bp", "highway_bp", {})).run()
    assert results["sizes"] == {"parameters": 1249, "train": 16, "validation": 16, "test": 16}
    assert results["defaults"] == "iterations=2, gamma=0.0"


@pytest.mark.parametrize("score", [TASK.score, DIGITS.score])
def test_the_score_of_a_model_that_returns_nan_is_nan(score):
    """The argmax of NaN is the first class, which would be right for a tenth of all digits."""
    width = 1 if score is TASK.score else 10
    split = Split(torch.zeros(4, width), torch.zeros((4, 1) if width == 1 else 4, dtype=torch.long))
    assert score.of(torch.nn.Identity(), split) == 100.0
    spoilt = Split(torch.where(torch.arange(4)[:, None] == 3, torch.nan, split.inputs), split.targets)
    assert isnan(score.of(torch.nn.Identity(), spoilt))


def test_peak_memory_of_known_work():
    x = torch.ones(1000, dtype=torch.float64)

    def three_at_once_then_one():
        a = x * x
        b = a * a
        c = a * b
        del a, b
        return c * c

    assert peak_memory(lambda: x * x, "cpu") == 8000
    assert peak_memory(three_at_once_then_one, "cpu") == 24000
    assert peak_memory(lambda: None, "cpu") == 0


def test_every_setting_changes_the_id():
    changes = [
        {"steps": 8},
        {"options": {**TASK.options, "width": 16}},
        {"data": failing},
        {"score": replace(TASK.score, factor=1.0)},
    ]
    found = [
        *(training(row) for row in (HIGHWAY, CHAIN, replace(HIGHWAY, options={"iterations": 2}))),
        *(training(HIGHWAY, seed=1), training(HIGHWAY, device="cuda")),
        *(training(HIGHWAY, task=replace(TASK, **change)) for change in changes),
    ]
    assert len({case.id for case in found}) == len(found) == 9


def test_records_of_dsfs_old_default_belong_to_rows_that_name_it():
    old, now = Row("dsf", "dsf", {"feedback": "linspace"}), Row("dsf", "dsf", {})
    assert (old.name, now.name) == ("dsf linspace", "dsf")
    assert training(old).config["row"] == {"label": "dsf", "engine": "dsf", "options": {}}
    assert training(now).config["row"]["options"] == {"feedback": None}
    named = Row("dsf linspace", "dsf", {"feedback": "linspace"})
    assert training(named).config["row"]["options"] == {"feedback": "linspace"}
    assert len({training(row).id for row in (old, now, named)}) == 3


def test_an_added_field_changes_the_id_only_if_it_is_not_at_its_default():
    @dataclass(frozen=True)
    class LaterTask(type(TASK)):
        schedule: str = field(default="one cycle", metadata=ADDED)

    LaterTask.__module__, LaterTask.__qualname__ = type(TASK).__module__, type(TASK).__qualname__
    settings = {f.name: getattr(TASK, f.name) for f in fields(TASK)}
    case = training(HIGHWAY, task=LaterTask(**settings))
    assert (case.id, case.config) == (training(HIGHWAY).id, training(HIGHWAY).config)
    other = training(HIGHWAY, task=LaterTask(**settings, schedule="constant"))
    assert other.id != case.id
    assert other.config["task"]["schedule"] == "constant"


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_suites_are_well_formed(suite):
    names = [case.id for case in cases(suite, 3, "cpu", {}) if case]
    assert len(set(names)) == len(names)
    for part in suite:
        rows = getattr(part, "rows", ())
        assert len({row.label for row in rows}) == len(rows)
        for row in rows:
            row.create_engine()
        if type(part) is Comparison:
            assert part.rows[0].options == {"plain": True}
            # Orthogonal models need real weights; drawing those of others takes long.
            with torch.device("cpu" if part.task.model.startswith(("orthogonal", "lenet", "mlp")) else "meta"):
                model = part.task.create_model(0)
            assert all(row.create_engine().validate(model, part.task.chains).ok for row in part.rows)
            assert part.learning_rates == tuple(sorted(part.learning_rates))


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl")))
def test_committed_records_belong_to_the_current_suite(name):
    """Other records would not be shown: run the suite again, or delete old records."""
    records = RecordFile(RESULTS / name / "records.jsonl").read()
    seeds = 1 + max(seed for record in records.values() for seed in record["seeds"])
    wanted = {case.id for case in cases(SUITES[name], seeds, "cpu", records) if case}
    assert records.keys() <= wanted
