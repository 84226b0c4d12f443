"""Runs looked at layer by layer, sweeps over depth and cadence: what is run, and what becomes of the figures."""

import math

import pytest
import torch
from report_records import curves, drawn, failed, markdown
from tiny_suite import TASK, fake, points

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import cases
from gradfree.benchmarks.tasks.task import SGDTask
from gradfree.benchmarks.training.cadence import Cadences
from gradfree.benchmarks.training.depths import DepthSweep
from gradfree.benchmarks.training.layerwise import LayerwiseTraining

PLAIN = Row("backprop", "backprop", {"plain": True})
FOTON = Row("foton", "foton", {"orthogonalize_every": 4, "orthogonalize_steps": 2})
ORTHOGONAL = SGDTask(
    name="points",
    data=points,
    model="orthogonal_mlp",
    options={"in_features": 4, "num_classes": 1},
    loss=TASK.loss,
    score=TASK.score,
    learning_rate=0.3,
    batch_size=8,
    steps=8,
    momentum=0.9,
)
DEPTHS = {2: {"depth": 2}, 3: {"depth": 3}}
SWEEP = DepthSweep(ORTHOGONAL, DEPTHS, (PLAIN, FOTON), (0.1, 0.3))


def run(row):
    task = SWEEP.comparisons[3].task
    return LayerwiseTraining(task=task, row=row, device="cpu", seed=0).run()


def test_each_layer_is_set_against_its_true_gradient():
    torch.set_default_dtype(torch.float32)
    probes = run(FOTON)["fidelity"]
    assert [probe["step"] for probe in probes] == [0, 2, 4, 5, 7]
    assert all(len(probe["layers"]) == 4 for probe in probes)
    assert all(probe["layers"][-1] == 1 for probe in probes)
    assert all(0 < cosine < 1 for probe in probes for cosine in probe["layers"][:-1])
    assert all(probe["layers"] == [1, 1, 1, 1] for probe in run(PLAIN)["fidelity"])


def test_the_engine_stays_attached_so_that_it_retracts_every_fourth_step():
    torch.set_default_dtype(torch.float32)
    drift = [loss["drift"] for loss in run(FOTON)["losses"]]
    assert drift[3] < 0.1 * drift[2]
    assert drift[7] < 0.1 * drift[6]
    assert max(drift) < run(PLAIN)["losses"][-1]["drift"]


def test_sgd_is_part_of_a_cases_name():
    (case,) = (case for case in SWEEP.comparisons[2].training(0, "cpu", tried(best=0.1)) if case.row == PLAIN)
    assert case.config["task"]["momentum"] == 0.9
    optimizer, _ = case.task.create_optimizer(case.task.create_model(0))
    assert type(optimizer) is torch.optim.SGD


def tried(best, part=SWEEP):
    trials = part.trials("cpu")
    return dict(fake(trial, {"validation": float(trial.task.learning_rate == best)}) for trial in trials)


def trained(part=SWEEP, best=0.1):
    """Trials and runs of two seeds: seed s scores 10 · depth + s, in the plain row 1 more, not to the last digit."""
    records = tried(best, part)
    for seed in range(2):
        for case in part.training(seed, "cpu", records):
            depth = case.task.options["depth"]
            score = 10.0 * depth + seed + (case.row == PLAIN) * (1 + 2e-4 * seed)
            cosines = [1.0 if case.row == PLAIN else 0.5 + 0.1 * seed] * depth + [1.0]
            probes = [{"step": step, "cosine": 0.9, "relative_error": 0.1, "layers": cosines} for step in (0, 7)]
            losses = [{"step": step, "loss": 1.0, "drift": drift} for step, drift in ((0, 1e-3), (7, 2e-3))]
            results = {"losses": losses, "fidelity": probes, "validation": score, "test": score}
            records |= dict([fake(case, results)])
    return records


def test_every_row_is_tried_and_trained_at_every_depth():
    listed = list(cases((SWEEP,), 2, "cpu", tried(best=0.1)))
    assert [case.kind for case in listed] == ["trial"] * 8 + ["layerwise training"] * 8
    assert {case.task.learning_rate for case in listed[8:]} == {0.1}
    assert [case.task.options["depth"] for case in listed[8:12]] == [2, 2, 3, 3]
    assert len({case.id for case in listed}) == 16


def test_the_table_has_a_column_for_each_depth():
    section = SWEEP.section(trained(), "cpu")
    text = markdown(section)
    assert "points: orthogonal_mlp by depth, 8 steps, seeds: 2, device: cpu" in text
    assert "| engine | 2 | 3 |" in text
    # Two seeds that differ by 1: Student's t, 12.706, times half of that.
    assert "| backprop | 21.50 ± 6.35 [1.00] | 31.50 ± 6.35 [1.00] |" in text
    assert "| foton | 20.50 ± 6.35 [0.55] | 30.50 ± 6.35 [0.55] |" in text
    assert section.verdicts() == [
        "the baseline",
        "accuracy beside backprop: worse at 2 (-1.00 ± 0.00), 3 (-1.00 ± 0.00)",
    ]
    (remark,) = section.remarks()
    assert "maybe better beyond: backprop at 2 (0.1)" in remark
    facts = {(f.subject, f.setting, f.quantity): f.value for f in section.facts()}
    assert facts["foton", "3 hidden layers", "test accuracy"] == 30.5
    assert facts["foton", "2 hidden layers", "cosine with the exact gradient"] == pytest.approx(0.55)
    assert facts["foton", "3 hidden layers", "test accuracy, difference to backprop"] == pytest.approx(-1, rel=1e-3)
    assert facts["foton", "2 hidden layers", "largest drift from orthogonality"] == 2e-3


def test_failed_runs_count_as_missing():
    records, (_, lost) = trained(), SWEEP.comparisons[2].training(1, "cpu", tried(best=0.1))
    section = SWEEP.section(records | dict([failed(lost)]), "cpu")
    assert "| foton | 20.00 ± – [0.50] | 30.50 ± 6.35 [0.55] |" in markdown(section)
    assert section.verdicts()[1] == (
        "accuracy beside backprop: one seed: no interval at 2 (-1.00); worse at 3 (-1.00 ± 0.00)"
    )
    first = next(case for case in SWEEP.comparisons[2].training(0, "cpu", records) if case.row == FOTON)
    section = SWEEP.section(records | dict([failed(lost), failed(first)]), "cpu")
    assert "| foton | failed | 30.50 ± 6.35 [0.55] |" in markdown(section)
    section.plots()


def test_a_run_that_diverged_is_called_so():
    records = trained()
    (lost,) = (record for name, record in records.items() if "points_2/foton/cpu/seed 1" in name)
    lost["results"]["test"] = math.nan
    section = SWEEP.section(records, "cpu")
    assert "| foton | diverged | 30.50 ± 6.35 [0.55] |" in markdown(section)
    assert section.verdicts()[1] == (
        "accuracy beside backprop: not comparable, as a run diverged at 2; worse at 3 (-1.00 ± 0.00)"
    )


def test_the_plots_show_scores_by_depth_and_alignment_by_layer():
    section = SWEEP.section(trained(), "cpu")
    scores = drawn(section, "accuracy against depth")
    assert [container.get_label() for container in scores.containers] == ["backprop", "foton"]
    assert [container.lines[0].get_xydata().tolist() for container in scores.containers][1] == [[2, 20.5], [3, 30.5]]
    alignment = drawn(section, "gradients layer by layer")
    lines = {line.get_label(): line.get_xydata().tolist() for line in alignment.get_lines()}
    assert lines["foton, step 7"] == [[1, 0.55], [2, 0.55], [3, 0.55], [4, 1]]
    assert not any("backprop" in label for label in lines)


def test_what_is_not_known_yet_is_left_open():
    assert SWEEP.section({}, "cpu") is None
    assert SWEEP.section(tried(best=0.1), "cpu") is None
    two = {name: record for name, record in trained().items() if "points_3" not in name}
    section = SWEEP.section(two, "cpu")
    assert "| foton | 20.50 ± 6.35 [0.55] | – ± – [–] |" in markdown(section)
    assert section.verdicts()[1] == "accuracy beside backprop: worse at 2 (-1.00 ± 0.00)"
    drawn(section, "accuracy against depth")
    drawn(section, "gradients layer by layer")


def test_a_cadence_shows_drift_in_place_of_alignment():
    rows = tuple(Row(f"foton every {n}", "foton", {"orthogonalize_every": n}) for n in (1, 4))
    rows += (Row("foton as it drifts", "foton", {}),)
    part = Cadences(ORTHOGONAL, DEPTHS, rows, (0.1, 0.3))
    section = part.section(trained(part), "cpu")
    text = markdown(section)
    assert section.verdicts() == [
        "the baseline",
        "accuracy beside foton every 1: the same with every seed at 2, 3",
        "accuracy beside foton every 1: the same with every seed at 2, 3",
    ]
    assert "| foton every 4 | 20.50 ± 6.35 [2.0e-03] | 30.50 ± 6.35 [2.0e-03] |" in text
    assert "in brackets the largest ‖W Wᵀ - I‖ seen in any layer. In words" in section.legend
    drift = drawn(section, "drift against cadence")
    assert curves(drift) == {f"{depth} hidden layers": [[1, 2e-3], [4, 2e-3]] for depth in (2, 3)}
    # A row without a cadence is a level.
    levels = {line.get_label(): line.get_ydata() for line in drift.get_lines()}
    assert set(levels["foton as it drifts, 3 hidden layers"]) == {2e-3}
    scores = drawn(section, "accuracy against cadence")
    assert scores.containers[1].lines[0].get_xydata().tolist() == [[1, 30.5], [4, 30.5]]
    assert part.section({}, "cpu") is None


def test_stored_data_are_optional(monkeypatch):
    """Without a folder of data sets the suite runs on digits."""
    monkeypatch.delenv(DATA_ROOT, raising=False)
    optional = {part.task.name for part in SUITES["forward-only"] if part.optional}
    assert optional == {"mnist", "mnist_lenet", "cifar10", "cifar10_conv"}
    rest = SUITES.keys() - {"forward-only", "foton-depth", "foton-depth-small"}
    assert not any(part.optional for name in rest for part in SUITES[name])


@pytest.mark.parametrize("part", [part for part in SUITES["forward-only"] if isinstance(part, DepthSweep)])
def test_every_depth_of_the_suite_is_that_of_its_network(part):
    for depth, comparison in part.comparisons.items():
        with torch.device("meta"):
            model = comparison.task.create_model(0)
        assert sum(p.dim() > 1 for p in model.parameters()) == depth + 1


def test_a_row_is_set_against_the_baseline_with_its_own_options_if_there_is_one():
    exact, foton = (
        tuple(Row(f"{name}{t}", engine, {"temperature": t} if t > 1 else {}) for t in (1, 4))
        for name, engine in (("exact", "orthogonal_backprop"), ("foton", "foton"))
    )
    part = DepthSweep(ORTHOGONAL, DEPTHS, (*exact, *foton, PLAIN), (0.1, 0.3))
    assert [words.partition(":")[0] for words in part.section(trained(part), "cpu").verdicts()] == [
        "the baseline",
        "accuracy beside exact1",
        "accuracy beside exact1",
        "accuracy beside exact4",
        "accuracy beside exact1",
    ]
