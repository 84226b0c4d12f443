"""Stored sets: how they are found, and how texts become token sequences."""

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value

from gradfree.benchmarks.data import stored
from gradfree.benchmarks.data.stored import DATA_ROOT, Images
from gradfree.benchmarks.data.text import Text
from gradfree.cli import main

CHARACTERS = Text("tiny", unit="character", vocabulary=5, length=3, held_out=2)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ROOT, str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path / "cache")
    return tmp_path


def store(root, **splits):
    (root / "tiny").mkdir()
    for name, rows in splits.items():
        Dataset.from_dict({"text": rows}).to_parquet(str(root / "tiny" / f"{name}-00000-of-00001.parquet"))


def test_characters_are_numbered_by_frequency_in_the_training_split(root):
    store(root, train=["aaaabbbcc\n"], validation=["abcd"], test=["ba" * 20])
    train, validation, test = CHARACTERS()
    assert train.inputs.tolist() == [[1, 1, 1], [1, 2, 2], [2, 3, 3]]
    assert train.targets.tolist() == [[1, 1, 1], [2, 2, 2], [3, 3, 4]]
    assert (validation.inputs.tolist(), validation.targets.tolist()) == ([[1, 2, 3]], [[2, 3, 0]])
    assert test.inputs.tolist() == [[2, 1, 2], [1, 2, 1]]


def test_pieces_are_bytes_and_the_most_frequent_merges(root):
    """The 256 bytes come first, then merges such as " a" + "b"; no token is unknown."""
    store(root, train=["ab ab ab ab"], validation=["ab ab ab ab"], test=["é ab ab"])
    pieces = Text("tiny", unit="piece", vocabulary=258, length=2, held_out=9)
    train, _, test = pieces()
    first, again, *_ = train.inputs.flatten().tolist()
    assert (first, again) == (256, 257)
    assert test.inputs.flatten().tolist()[0] < 256
    assert train.targets[0].tolist() == [257, 257]


def test_a_set_is_read_once_and_then_loaded_from_the_cache(root, monkeypatch):
    """With an empty memory cache, nothing is decoded or tokenized again."""
    store(root, train=["abcabc"], validation=["abc"], test=["cba"])
    first = CHARACTERS()
    stored._load.cache_clear()
    monkeypatch.setattr(Text, "read", None)
    for again, before in zip(CHARACTERS(), first, strict=True):
        assert again is not before
        assert torch.equal(again.inputs, before.inputs)
        assert torch.equal(again.targets, before.targets)


@pytest.mark.parametrize(("shape", "channels"), [((2, 3), 1), ((2, 3, 3), 3)])
def test_images_have_channels_first_and_are_normalised_by_the_training_images(root, shape, channels):
    (root / "tiny").mkdir()
    features = Features({"picture": Image(), "label": Value("int64")})
    pixels = {"train": range(6), "test": range(50, 53)}
    for name, values in pixels.items():
        rows = {"picture": [np.full(shape, value, dtype=np.uint8) for value in values], "label": list(values)}
        Dataset.from_dict(rows, features=features).to_parquet(str(root / "tiny" / f"{name}-00000-of-00001.parquet"))
    data = Images("tiny", column="picture", train=3, validation=2)()
    assert [split.targets.tolist() for split in data] == [[0, 1, 2], [4, 5], [50, 51, 52]]
    assert data.train.inputs.shape == (3, channels, 2, 3)
    assert data.train.inputs.mean() == pytest.approx(0.0, abs=1e-6)
    assert data.train.inputs.std() == pytest.approx(1.0)


@pytest.mark.parametrize("command", [["run", "--suite", "text"], ["run", "--suite", "text", "--data", "nowhere"]])
def test_a_missing_set_is_an_error_before_the_run_starts(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Set first, so that monkeypatch also undoes what --data sets.
    monkeypatch.setenv(DATA_ROOT, "")
    monkeypatch.delenv(DATA_ROOT)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *command])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    problem = (
        "nowhere/tinyshakespeare has no parquet files"
        if "--data" in command
        else "is not set to the folder of the sets"
    )
    assert "the set tinyshakespeare is needed, but" in line
    assert problem in line
    assert "hf download --repo-type dataset karpathy/tiny_shakespeare" in line
    assert not (tmp_path / "results").exists()
