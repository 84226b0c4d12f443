"""The user's model and data, given by the names of two functions."""

import re
import sys
from dataclasses import replace

import pytest
import torch
import user_module
from tiny_suite import PLAIN, training

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.benchmarks.sweeps.sweep import suite_of
from gradfree.benchmarks.tasks.imported import Imported
from gradfree.benchmarks.tasks.loaded import Loaded, own_task
from gradfree.benchmarks.tasks.own_metrics import MeanScore
from gradfree.cli import UsageError, main

MODEL, DATA = "user_module:build", "user_module:loader"


def loaded(name):
    return Loaded(Imported.find(f"user_module:{name}"))()


def test_a_tenth_each_of_one_source_is_held_out_and_named_sources_are_the_splits():
    whole = user_module.inputs()
    for name in ("loader", "pair"):
        data = loaded(name)
        assert [len(split.inputs) for split in data] == [32, 4, 4]
        together = torch.cat([split.inputs for split in data])
        assert {tuple(x) for x in together.tolist()} == {tuple(x) for x in whole.tolist()}
        assert all(torch.equal(split.targets, split.inputs[:, :3].argmax(1)) for split in data)
    x, y = user_module.pair()
    for split, part in zip(loaded("named"), (slice(20), slice(20, 30), slice(30, 40)), strict=True):
        assert torch.equal(split.inputs, x[part])
        assert torch.equal(split.targets, y[part])


def test_the_loss_and_the_score_are_those_of_the_targets():
    classes = own_task(MODEL, {}, DATA, None, None)
    assert (classes.score.name, classes.score.goodness(2.0)) == ("accuracy", 2.0)
    results = training(PLAIN, task=classes).run()
    assert 0 <= results["validation"] <= 100
    regression = own_task("user_module:build_regression", {}, "user_module:regression", None, None)
    assert (regression.score.name, regression.score.goodness(2.0)) == ("loss", -2.0)
    chosen = own_task("user_module:build_regression", {}, "user_module:regression", "user_module:loss", None)
    model, data = chosen.create_model(0), chosen.data()
    assert chosen.loss(torch.tensor([[1.0]]), torch.tensor([[3.0]])) == 2
    expected = user_module.loss(model(data.train.inputs), data.train.targets).item()
    assert chosen.score.of(model, data.train) == pytest.approx(expected)


def test_a_score_of_the_users_is_taken_beside_a_loss_of_theirs():
    (part,) = suite_of(Sweep(model=MODEL, engines="fa", loss="user_module:class_loss", score="user_module:right"), DATA)
    task, model = part.task, part.task.create_model(0)
    assert (task.score.name, task.score.goodness(2.0)) == ("right", 2.0)
    inputs, targets = task.data().train
    expected = (model(inputs).argmax(1) == targets).double().mean().item()
    assert task.score.of(model, task.data().train) == pytest.approx(expected)
    assert 0 <= training(PLAIN, task=replace(task, steps=2)).run()["validation"] <= 1
    with pytest.raises(UsageError, match="no function of user_module is called 'none'"):
        suite_of(Sweep(model=MODEL, engines="fa", score="user_module:none"), DATA)


@pytest.mark.parametrize("mean", [False, True])
def test_a_score_may_be_one_number_for_each_example(mean):
    """Each example counts once, whatever the sizes of the batches are."""
    right = torch.cat([torch.ones(32), torch.zeros(16)])
    metric = MeanScore(lambda outputs, _: outputs.mean() if mean else outputs)
    for part in right.split(32):
        metric.update(part, part)
    assert metric.compute() == pytest.approx(32 / 48)


def test_options_and_axes_reach_the_builder():
    sweep = Sweep(model={MODEL: {"depth": [2, 3]}}, engines="highway_bp", batch_size=5)
    two, three = suite_of(sweep, DATA)
    assert [len(part.task.create_model(0).blocks) for part in (two, three)] == [2, 3]
    assert (two.task.name, two.task.batch_size) == ("user_module:build depth=2 batch=5", 5)
    (deep,) = suite_of(Sweep(model=MODEL, depth=6), DATA)
    assert len(deep.task.create_model(0).blocks) == 6
    (named,) = suite_of(Sweep(model=MODEL, chains=["blocks"]), DATA)
    assert named.task.chains == ("blocks",)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ("user_module:biuld", DATA, "no function of user_module is called 'biuld'.*Did you mean 'build'"),
        ("user_module:broken", DATA, "user_module:broken fails: OSError: no such disk"),
        ("user_module:leaving", DATA, "user_module:leaving fails: SystemExit: 0"),
        (MODEL, "user_module:bad_batches", "has a batch that is a dict, not two tensors"),
        (MODEL, "user_module:unequal", "inputs of shape .30, 4. and targets of shape .40,.: the first size must be"),
        ("user_module:build_tuple", DATA, "cannot be trained on these data: AttributeError: 'tuple' object"),
        (
            MODEL,
            "user_module:regression",
            "^user_module:build cannot be trained on these data: .*outputs are .2, 3., the targets .2, 1.",
        ),
        (MODEL, None, "a run with --model also needs --data module:function"),
        ("residual_mlp", DATA, "residual_mlp names no function; write residual_mlp:build"),
    ],
)
def test_unusable_models_and_data_are_refused(model, data, message):
    with pytest.raises(UsageError) as refused:
        suite_of(Sweep(model=model), data)
    assert re.search(message, str(refused.value), re.DOTALL)


@pytest.mark.processes
@pytest.mark.slow
def test_a_model_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "their_module.py").write_text("from user_module import *\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    flags = ["--model", "their_module:build", "--data", "their_module:loader", "--engines", "highway_bp"]
    main(["bench", "run", *flags, "--seeds", "1", "--steps", "5", "--jobs", "2"])
    (folder,) = (tmp_path / "results").iterdir()
    records = RecordFile(folder / "records.jsonl").read()
    assert len(records) == 3
    assert not any("error" in record for record in records.values())
