"""A folder of the user's own becomes a task: what is in it, how it is split, and what is refused."""

import os
import re

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from tiny_suite import PLAIN, training

from gradfree.benchmarks.data.stored import open_set
from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.benchmarks.sweeps.sweep import suite_of
from gradfree.benchmarks.tasks.folders import folder_task
from gradfree.cli import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, columns, features=None):
    path.parent.mkdir(exist_ok=True)
    Dataset.from_dict(columns, features=features).to_parquet(str(path))


def pictures(here, labels, shape=(8, 8), file="train.parquet"):
    features = Features({"picture": Image(), "class": Value("int64")})
    pixels = [np.full(shape, value, dtype=np.uint8) for value in range(len(labels))]
    write(here / "pictures" / file, {"picture": pixels, "class": labels}, features)


def test_a_text_file_is_trained_on_but_for_its_last_two_tenths(here):
    (here / "texts").mkdir()
    (here / "texts" / "all.txt").write_text("".join(f"{n} {n}\n" for n in range(100)))
    task = folder_task("./texts", {"unit": "word", "vocabulary": 300, "length": 3})
    tokens = [split.inputs.flatten() for split in task.data()]
    assert [len(part) for part in tokens] == [80 * 3 - 3, 30 - 3, 30 - 3]
    assert len(tokens[0].unique()) == 1 + 79
    # What was never trained on is unknown, and so the same.
    assert tokens[2].unique().tolist() == tokens[1].unique().tolist() == [0, int(tokens[0].mode().values)]
    assert (task.name, task.score.unit) == ("texts", "per word")
    assert training(PLAIN, task=task).topic == "texts"


def test_splits_that_are_there_are_taken(here):
    for name in ("train", "validation", "test"):
        write(here / "texts" / f"{name}.parquet", {"line": [name[0] * 4] * 12, "number": [1] * 12})
    data = folder_task("./texts", {"length": 2, "vocabulary": 5}).data()
    assert [len(split.inputs) for split in data] == [29, 29, 29]
    assert data.train.inputs.unique().tolist() == [1, 2]
    assert data.test.inputs.unique().tolist() == data.train.inputs.unique().tolist()


def test_images_are_held_out_at_random_and_always_the_same(here):
    """Sets are often sorted by class: their last tenth would be one class alone."""
    pictures(here, [n // 50 for n in range(100)])
    task = folder_task("./pictures", {})
    data = task.data()
    assert [len(split.inputs) for split in data] == [80, 10, 10]
    assert data.test.targets.unique().tolist() == [0, 1]
    assert len(torch.cat([split.inputs for split in data]).unique()) == 100
    assert (task.options["in_channels"], task.options["num_classes"]) == (1, 2)
    assert torch.equal(folder_task("./pictures", {}).data().test.inputs, data.test.inputs)


def test_other_files_make_other_cases(here):
    pictures(here, [0, 1] * 10)
    before = training(PLAIN, task=folder_task("./pictures", {})).id
    assert training(PLAIN, task=folder_task("./pictures", {})).id == before
    pictures(here, [1, 0] * 10)
    changed = folder_task("./pictures", {})
    assert training(PLAIN, task=changed).id != before
    assert changed.data().train.targets.tolist() != folder_task("./pictures", {}).data().test.targets.tolist()


def test_a_change_that_keeps_the_size_and_time_of_a_file_is_seen(here):
    """As a copy that keeps times makes it: the id and what is trained on are those of the new file."""
    (here / "texts").mkdir()
    file = here / "texts" / "all.txt"
    read = {}
    for letters in ("ab", "ac"):
        file.write_text(f"{letters}\n" * 50 + f"{letters[1]}\n" * 50)
        os.utime(file, (1e9, 1e9))
        task = folder_task("./texts", {"length": 2, "column": "text"})
        read[training(PLAIN, task=task).id] = open_set(here / "texts", task.data.files)["train"]["text"][0]
    assert list(read.values()) == ["ab", "ac"]


def test_files_that_only_look_changed_make_no_other_cases(here):
    """Times, and hidden files as systems strew them: `datasets` reads none of these."""
    pictures(here, [0, 1] * 10)
    before = training(PLAIN, task=folder_task("./pictures", {})).id
    os.utime(here / "pictures" / "train.parquet", (1e9, 1e9))
    (here / "pictures" / ".DS_Store").write_text("view")
    (here / "pictures" / "__pycache__").mkdir()
    (here / "pictures" / "__pycache__" / "module.pyc").write_text("code")
    assert training(PLAIN, task=folder_task("./pictures", {})).id == before
    (here / "pictures" / "test.parquet").write_bytes((here / "pictures" / "train.parquet").read_bytes())
    assert training(PLAIN, task=folder_task("./pictures", {})).id != before


def test_a_folder_that_changes_before_it_is_read_is_refused(here):
    """What is trained on would not be what the case is called after."""
    (here / "texts").mkdir()
    (here / "texts" / "all.txt").write_text("a b\n" * 100)
    task = folder_task("./texts", {"length": 2})
    (here / "texts" / "all.txt").write_text("b a\n" * 100)
    with pytest.raises(UsageError, match=r"texts was changed while it was used; repeat the command\."):
        task.data()


def test_a_folder_is_swept_over_with_models_and_lengths(here):
    (here / "texts").mkdir()
    (here / "texts" / "all.txt").write_text("abcd efgh\n" * 200)
    sweep = Sweep(tasks="./texts", model={"gpt": {"layers": 2, "width": 8, "heads": 2}}, length="4,8", engines="dsf")
    parts = suite_of(sweep)
    assert [part.task.options["context"] for part in parts] == [4, 8]
    assert [part.task.data().train.inputs.shape[1] for part in parts] == [4, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name the column, of a, b: --tasks '{./two: {column: NAME}}'"),
        ({"column": "c"}, "./two: no column is called 'c'; there are: a, b"),
        ({"column": "a", "legnth": 3}, "no option of ./two is called 'legnth'.* Did you mean 'length'"),
        ({"column": "a", "unit": "syllable"}, "./two: no unit is called 'syllable'"),
        ({"column": "a", "length": 0}, "./two: length must be a whole number above 0, not 0"),
        ({"column": "a", "length": 999}, "./two: train has .* tokens, fewer than length 999"),
    ],
)
def test_what_a_text_cannot_be_is_said(here, options, message):
    write(here / "two" / "train.parquet", {"a": ["x y"] * 20, "b": ["u v"] * 20})
    with pytest.raises(UsageError) as refused:
        suite_of(Sweep(tasks={"./two": options}, engines="dsf"))
    assert re.search(message, str(refused.value))


@pytest.mark.parametrize(
    ("labels", "shape", "message"),
    [
        ([-1] * 20, (8, 8), "./pictures: class has negative numbers"),
        ([0, 1] * 3, (8, 8), "./pictures has 6 rows to train on, too few to hold out a tenth"),
        ([0, 1] * 10, (9, 9), "pictures: preact_resnet cannot be trained on these data: height and width"),
    ],
)
def test_what_images_cannot_be_is_said(here, labels, shape, message):
    pictures(here, labels, shape)
    with pytest.raises(UsageError) as refused:
        suite_of(Sweep(tasks="./pictures", engines="highway_bp"))
    assert re.search(message, str(refused.value))


def test_images_of_different_sizes_are_refused(here):
    pictures(here, [0, 1] * 10)
    pictures(here, [0, 1], (4, 8), file="test.parquet")
    pictures(here, [0, 1], (8, 4), file="validation.parquet")
    with pytest.raises(UsageError, match=r"./pictures: the images differ in size, 4×8, 8×4, 8×8: .*side: 32"):
        folder_task("./pictures", {})


def test_images_of_mixed_sizes_and_colours_are_scaled_to_squares(here):
    """Grey beside RGB: the grey values three times. A side of another kind is refused."""
    pictures(here, [0, 1] * 10)
    pictures(here, [0, 1], (4, 8, 3), file="test.parquet")
    pictures(here, [0, 1], (8, 4), file="validation.parquet")
    data = folder_task("./pictures", {"side": 6}).data()
    assert {split.inputs.shape[1:] for split in data} == {(3, 6, 6)}
    assert len(data.train.inputs.unique()) == 20
    with pytest.raises(UsageError, match=r"side must be a number of pixels, not '6'"):
        folder_task("./pictures", {"side": "6"})


def test_a_picture_that_is_none_is_named(here):
    for name in ("a/1.png", "a/2.png", "b/3.png", *(f"b/{n}.png" for n in range(10))):
        (here / "photos" / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("L", (8, 8)).save(here / "photos" / "train" / name)
    (here / "photos" / "train" / "a" / "2.png").write_text("no picture")
    with pytest.raises(UsageError, match=r"photos has a file that is no image: .*2\.png"):
        folder_task("./photos", {})


def test_folders_without_anything_to_train_on_are_refused(here):
    with pytest.raises(UsageError, match=r"there is no folder \./nowhere"):
        folder_task("./nowhere", {})
    (here / "empty").mkdir()
    with pytest.raises(UsageError, match=r"\./empty cannot be read: .* doesn't contain any data files"):
        folder_task("./empty", {})
    write(here / "numbers" / "train.parquet", {"a": [1.0] * 20})
    with pytest.raises(UsageError, match=r"\./numbers has neither images nor text, but the columns a"):
        folder_task("./numbers", {})
    write(here / "late" / "test.parquet", {"text": ["a"] * 20})
    with pytest.raises(UsageError, match=r"\./late has no split to train on, but test"):
        folder_task("./late", {})


def test_a_text_that_is_not_utf8_is_named(here):
    (here / "texts").mkdir()
    (here / "texts" / "good.txt").write_text("some text\n" * 20)
    (here / "texts" / "latin.txt").write_bytes("Käse\n".encode("latin-1") * 20)
    with pytest.raises(UsageError, match=r"latin\.txt is not UTF-8"):
        folder_task("./texts", {})
