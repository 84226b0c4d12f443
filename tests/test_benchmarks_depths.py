"""Runs looked at layer by layer, sweeps over depth and cadence: what is run, and what becomes of the figures."""

import pytest
import torch
from matplotlib.figure import Figure
from tiny_suite import TASK, fake, points

from gradfree.benchmarks.cadence import Cadences
from gradfree.benchmarks.case import Row
from gradfree.benchmarks.depths import DepthSweep
from gradfree.benchmarks.layerwise import LayerwiseTraining
from gradfree.benchmarks.part import cases
from gradfree.benchmarks.report import markdown
from gradfree.benchmarks.stored import DATA_ROOT
from gradfree.benchmarks.suites import SUITES
from gradfree.benchmarks.tasks import SGDTask

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
    """Trials and runs of two seeds: seed s scores 10 · depth + s, in the plain row 1 more."""
    records = tried(best, part)
    for seed in range(2):
        for case in part.training(seed, "cpu", records):
            depth = case.task.options["depth"]
            score = 10.0 * depth + seed + (case.row == PLAIN)
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
    text = markdown([section])
    assert "points: orthogonal_mlp by depth, 8 steps, seeds: 2, device: cpu" in text
    assert "| engine | 2 | 3 |" in text
    assert "| backprop | 21.50 ± 0.71 [1.00] | 31.50 ± 0.71 [1.00] |" in text
    assert "| foton | 20.50 ± 0.71 [0.55] | 30.50 ± 0.71 [0.55] |" in text
    remarks = list(section.remarks())
    assert remarks[0] == "foton against backprop, test accuracy by depth: 2: -1.00, 3: -1.00."
    assert "maybe better beyond: backprop at 2 (0.1)" in remarks[1]


def test_the_plots_show_scores_by_depth_and_alignment_by_layer():
    top, bottom = Figure().subplots(2)
    SWEEP.section(trained(), "cpu").draw(top, bottom)
    assert [container.get_label() for container in top.containers] == ["backprop", "foton"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in bottom.get_lines()}
    assert lines["foton, step 7"] == [[1, 0.55], [2, 0.55], [3, 0.55], [4, 1]]
    assert not any("backprop" in label for label in lines)


def test_what_is_not_known_yet_is_left_open():
    assert SWEEP.section({}, "cpu") is None
    assert SWEEP.section(tried(best=0.1), "cpu") is None
    two = {name: record for name, record in trained().items() if "points_3" not in name}
    section = SWEEP.section(two, "cpu")
    assert "| foton | 20.50 ± 0.71 [0.55] | – ± – [–] |" in markdown([section])
    section.draw(*Figure().subplots(2))


def test_a_cadence_shows_drift_in_place_of_alignment():
    paced = (Row(f"foton every {n}", "foton", {"orthogonalize_every": n}) for n in (1, 4))
    rows = (*paced, Row("foton", "foton", {}))
    part = Cadences(ORTHOGONAL, DEPTHS, rows, (0.1, 0.3))
    section = part.section(trained(part), "cpu")
    text = markdown([section])
    assert "| foton every 4 | 20.50 ± 0.71 [2.0e-03] | 30.50 ± 0.71 [2.0e-03] |" in text
    assert "in brackets the largest ‖W Wᵀ - I‖ seen in any layer. Learning rates" in section.legend
    top, bottom = Figure().subplots(2)
    section.draw(top, bottom)
    curve, own = [[1, 2e-3], [4, 2e-3]], [[0, 2e-3], [1, 2e-3]]
    assert [line.get_xydata().tolist() for line in bottom.get_lines()] == [curve, own, curve, own]
    assert part.section({}, "cpu") is None


def test_stored_data_are_optional(monkeypatch):
    """Without a folder of data sets the suite runs on digits."""
    monkeypatch.delenv(DATA_ROOT, raising=False)
    optional = {part.task.name for part in SUITES["forward-only"] if part.optional}
    assert optional == {"mnist", "mnist_lenet", "cifar10", "cifar10_conv"}
    assert not any(part.optional for name, suite in SUITES.items() if name != "forward-only" for part in suite)


@pytest.mark.parametrize("part", [part for part in SUITES["forward-only"] if isinstance(part, DepthSweep)])
def test_every_depth_of_the_suite_is_that_of_its_network(part):
    for depth, comparison in part.comparisons.items():
        with torch.device("meta"):
            model = comparison.task.create_model(0)
        assert sum(p.dim() > 1 for p in model.parameters()) == depth + 1
