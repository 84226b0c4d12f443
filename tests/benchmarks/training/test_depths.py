"""Depth sweeps: layerwise results, and the section that shows them."""

import pytest
import torch
from report_records import fact_values, markdown, section_of
from tiny_suite import TASK, fake, points

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tasks.task import SGDTask
from gradfree.benchmarks.training.depths import DepthSweep, LayerwiseTraining

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


def test_the_cosine_of_each_layer_is_recorded():
    torch.set_default_dtype(torch.float32)
    probes = run(FOTON)["fidelity"]
    assert [probe["step"] for probe in probes] == [0, 2, 4, 5, 7]
    assert all(len(probe["layers"]) == 4 for probe in probes)
    assert all(probe["layers"][-1] == 1 for probe in probes)
    assert all(0 < cosine < 1 for probe in probes for cosine in probe["layers"][:-1])
    assert all(probe["layers"] == [1, 1, 1, 1] for probe in run(PLAIN)["fidelity"])


def tried(best, part=SWEEP):
    trials = part.trials("cpu")
    return dict(fake(trial, {"validation": float(trial.task.learning_rate == best)}) for trial in trials)


def trained(part=SWEEP, best=0.1):
    """Return trials and runs of two seeds: seed s scores 10 · depth + s, and about 1 more in the plain row."""
    records = tried(best, part)
    for seed in range(2):
        for case in part.training(seed, "cpu", records):
            depth = case.task.options["depth"]
            score = 10.0 * depth + seed + (case.row == PLAIN) * (1 + 2e-4 * seed)
            cosines = [1.0 if case.row == PLAIN else 0.5 + 0.1 * seed] * depth + [1.0]
            probes = [{"step": step, "cosine": 0.9, "relative_error": 0.1, "layers": cosines} for step in (0, 7)]
            results = {"losses": [], "fidelity": probes, "validation": score, "test": score}
            records |= dict([fake(case, results)])
    return records


def test_the_table_has_a_column_for_each_depth():
    section = section_of(SWEEP, trained())
    text = markdown(section)
    assert "points: orthogonal_mlp by depth, 8 steps, seeds: 2, device: cpu" in text
    assert "| engine | 2 | 3 |" in text
    # Two seeds that differ by 1: the margin is Student's t, 12.706, times 0.5.
    assert "| autograd | 21.50 ± 6.35 [1.00] | 31.50 ± 6.35 [1.00] |" in text
    assert "| foton | 20.50 ± 6.35 [0.55] | 30.50 ± 6.35 [0.55] |" in text
    assert section.verdicts == [
        "the baseline",
        "accuracy beside autograd: worse at 2 (-1.00 ± 0.00), 3 (-1.00 ± 0.00)",
    ]
    (remark,) = section.remarks
    assert "maybe better beyond it: autograd at 2 (0.1)" in remark
    difference = "test accuracy, difference to autograd"
    value, *_, seeds = fact_values(section, row="foton", setting="3 hidden layers", metric=difference)
    assert (value, seeds) == (pytest.approx(-1, rel=1e-3), 2)
    answer = "points: with 3 hidden layers, autograd has the best mean test accuracy, 31.50 %; the baseline."
    assert section.answer == answer


def test_a_row_is_compared_with_the_baseline_engine_with_its_options():
    exact, foton = (
        tuple(Row(f"{name}{t}", engine, {"temperature": t} if t > 1 else {}) for t in (1, 4))
        for name, engine in (("exact", "orthogonal_backprop"), ("foton", "foton"))
    )
    part = DepthSweep(ORTHOGONAL, DEPTHS, (*exact, *foton, PLAIN), (0.1, 0.3))
    assert [words.partition(":")[0] for words in section_of(part, trained(part)).verdicts] == [
        "the baseline",
        "accuracy beside exact1",
        "accuracy beside exact1",
        "accuracy beside exact4",
        "accuracy beside exact1",
    ]
