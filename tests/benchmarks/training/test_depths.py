"""Depth sweeps record layerwise results; the committed reports test the section that shows them."""

import torch
from tiny_suite import TASK, points

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
SWEEP = DepthSweep(ORTHOGONAL, (PLAIN, FOTON), (0.1, 0.3), depths={2: {"depth": 2}, 3: {"depth": 3}})


def run(row):
    task, _ = SWEEP.trainings[-1]
    return LayerwiseTraining(task=task, row=row, device="cpu", seed=0).run()


def test_the_cosine_of_each_layer_is_recorded():
    torch.set_default_dtype(torch.float32)
    probes = run(FOTON)["fidelity"]
    assert [probe["step"] for probe in probes] == [0, 2, 4, 5, 7]
    assert all(len(probe["layers"]) == 4 for probe in probes)
    assert all(probe["layers"][-1] == 1 for probe in probes)
    assert all(0 < cosine < 1 for probe in probes for cosine in probe["layers"][:-1])
    assert all(probe["layers"] == [1, 1, 1, 1] for probe in run(PLAIN)["fidelity"])
