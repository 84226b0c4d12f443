"""Tasks can read data sets with the layouts in docs/guides/data.md."""

import re
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from places import DOCS

from gradfree.benchmarks.data.stored import DATA_ROOT, Images, Stored
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.sweeps.sweep import TASKS
from gradfree.cli import UsageError

ROW = re.compile(r"^\| (`[\w-]+`(?:, `[\w-]+`)*) \| ([^|]+) \| ([\w, ]+) \| ([^|]*)\|$", re.MULTILINE)


def layouts():
    """Yield name, columns, splits and description of each set on the page."""
    for names, columns, splits, examples in ROW.findall((DOCS / "guides/data.md").read_text(encoding="utf-8")):
        for name in re.findall(r"`([\w-]+)`", names):
            yield name, (re.findall(r"`(\w+)`", columns), splits.split(", "), examples)


LAYOUTS = dict(layouts())


def users():
    """Return one task for each stored set, class of data and model."""
    named = [
        *TASKS.values(),
        *(experiment.task for suite in SUITES.values() for experiment in suite if hasattr(experiment, "task")),
    ]
    return {(task.data.name, type(task.data), task.model): task for task in named if isinstance(task.data, Stored)}


def pictures(shape, columns, count):
    generator = np.random.default_rng(0)
    pixels = [generator.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]
    rows = {columns[0]: pixels, columns[1]: [n % 10 for n in range(count)]}
    return Dataset.from_dict(rows, features=Features({columns[0]: Image(), columns[1]: Value("int64")}))


def stand_in(folder, name):
    """Write a small set with the layout on the page."""
    columns, splits, examples = LAYOUTS[name]
    for split in splits:
        if "×" in examples:
            side = int(examples.partition("×")[0])
            rows = pictures((side, side) if "grey" in examples else (side, side, 3), columns, 40)
        else:
            rows = Dataset.from_dict({columns[0]: [" the cat sat on a mat \n" * 40] * 40})
        (folder / name).mkdir(parents=True, exist_ok=True)
        rows.to_parquet(str(folder / name / f"{split}-00000-of-00001.parquet"))


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ROOT, str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path / "cache")
    return tmp_path


def test_the_page_has_the_layout_of_every_set():
    assert {name for name, _, _ in users()} == LAYOUTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("task", users().values(), ids=lambda task: task.name)
def test_tasks_train_on_small_sets_of_the_documented_layout(task, root):
    stand_in(root, task.data.name)
    small = {"train": 20, "validation": 10} if isinstance(task.data, Images) else {"length": 8}
    task = replace(task, data=replace(task.data, **small), batch_size=4)
    data = task.data()
    assert all(len(split.inputs) for split in data)
    model = task.create_model(0).float()
    batch = task.on("cpu", next(task.batches(data.train, 0)))
    assert torch.isfinite(task.loss(model(batch.inputs), batch.targets))


def test_a_set_with_fewer_images_than_a_task_takes_is_refused(root):
    stand_in(root, "mnist")
    with pytest.raises(UsageError, match="mnist has 40 images to train on, and 22000 are needed"):
        TASKS["mnist"].data()
