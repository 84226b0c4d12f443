"""Stored sets: how they are found, and how a text becomes sequences."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from tiny_suite import HIGHWAY, PLAIN, training

from gradfree.benchmarks.comparison import Comparison
from gradfree.benchmarks.forward_only import FORWARD_ONLY
from gradfree.benchmarks.images import Images
from gradfree.benchmarks.stored import DATA_ROOT
from gradfree.benchmarks.suites import SUITES
from gradfree.benchmarks.tasks import TINYSHAKESPEARE, WIKITEXT2
from gradfree.benchmarks.text import Text
from gradfree.cli import UsageError, main

CHARACTERS = Text("tiny", unit="character", vocabulary=5, length=3, held_out=2)
WORDS = Text("tiny", unit="word", vocabulary=4, length=2, held_out=9)


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ROOT, str(tmp_path))
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


def test_words_are_the_most_frequent_ones_and_the_ends_of_lines(root):
    store(root, train=["the cat \n", "", "the dog of the cat"], validation=["the the\n"], test=["a cat", "dog"])
    train, validation, test = WORDS()
    end, the, cat, rare = 1, 2, 3, 0
    assert train.inputs.tolist() == [[the, cat], [end, end], [the, rare], [rare, the]]
    assert train.targets.tolist() == [[cat, end], [end, the], [rare, rare], [the, cat]]
    assert validation.inputs.tolist() == [[the, the]]
    assert (test.inputs.tolist(), test.targets.tolist()) == ([[rare, cat], [end, rare]], [[cat, end], [rare, end]])


def test_unknown_words_of_the_text_itself_are_the_vocabularys(root):
    store(root, train=["<unk> <unk> <unk> a"], validation=["<unk> b a"], test=["a a a"])
    train, validation, _ = WORDS()
    assert validation.inputs[0, 0] == validation.inputs[0, 1] == train.inputs[0, 0]


@pytest.mark.parametrize(("shape", "channels"), [((2, 3), 1), ((2, 3, 3), 3)])
def test_images_come_with_channels_first_by_the_training_images_mean_and_variance(root, shape, channels):
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
    torch.testing.assert_close(
        data.test.inputs[1, 0, 0, 0] - data.test.inputs[0, 0, 0, 0],
        data.train.inputs[1, 0, 0, 0] - data.train.inputs[0, 0, 0, 0],
    )


def test_a_text_is_part_of_a_cases_name():
    task = TINYSHAKESPEARE
    assert task.data.name in str(training(task=task).config)
    changed = {training(HIGHWAY, task=task).id, training(HIGHWAY, task=WIKITEXT2).id}
    assert len(changed) == 2


@pytest.mark.parametrize("command", [["run", "--suite", "text"], ["run", "--suite", "text", "--data", "nowhere"]])
def test_what_is_missing_is_said_before_anything_starts(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Set and deleted: whatever --data sets is undone too.
    monkeypatch.setenv(DATA_ROOT, "")
    monkeypatch.delenv(DATA_ROOT)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *command])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    problem = "nowhere/tinyshakespeare has no parquet files" if "--data" in command else "names the folder of the sets"
    assert "the set tinyshakespeare is needed, but" in line
    assert problem in line
    assert "hf download --repo-type dataset karpathy/tiny_shakespeare" in line
    assert not (tmp_path / "results").exists()


def test_a_set_without_files_is_missing(root):
    (root / "wikitext-2").mkdir()
    with pytest.raises(UsageError, match=rf"{root}/wikitext-2 has no parquet files. Do: .* Salesforce/wikitext .*"):
        WIKITEXT2.data()


@pytest.mark.slow
def test_workers_find_the_data_that_the_option_names(root, tmp_path_factory, monkeypatch, capsys):
    store(root, train=["abcd" * 20], validation=["abcd" * 2], test=["abcd" * 2])
    monkeypatch.setenv(DATA_ROOT, "elsewhere")
    task = replace(TINYSHAKESPEARE, data=CHARACTERS, options={"vocab_size": 5, "width": 4}, batch_size=4, steps=5)
    monkeypatch.setitem(SUITES, "tiny", (Comparison(task, (PLAIN, HIGHWAY)),))
    out = tmp_path_factory.mktemp("out")
    main(["bench", "run", "--suite", "tiny", "--out", str(out), "--seeds", "1", "--data", str(root)])
    assert "test perplexity" in (out / "report.md").read_text(encoding="utf-8")


@pytest.mark.skipif(DATA_ROOT not in os.environ, reason=f"{DATA_ROOT} is not set")
@pytest.mark.parametrize("part", [part for part in FORWARD_ONLY if part.optional])
def test_the_real_images_fit_their_models(part):
    data, model = part.task.data(), next(iter(part.comparisons.values())).task.create_model(0)
    assert model.float()(data.test.inputs[:2]).shape == (2, 10)
    assert [len(split.inputs) for split in data] == [part.task.data.train, part.task.data.validation, 10000]
    assert all(split.targets.unique().tolist() == list(range(10)) for split in data)


@pytest.mark.skipif(DATA_ROOT not in os.environ, reason=f"{DATA_ROOT} is not set")
@pytest.mark.parametrize(("task", "tokens"), [(TINYSHAKESPEARE, 1_003_854), (WIKITEXT2, 2_088_628)])
def test_the_real_texts_fit_their_models(task, tokens):
    data, vocabulary = task.data(), task.options["vocab_size"]
    length = task.data.length
    assert data.train.inputs.shape == (pytest.approx(tokens / length, abs=1), length)
    assert task.data.vocabulary == vocabulary
    assert data.train.inputs.max() == vocabulary - 1
    assert all(200 < len(split.inputs) <= task.data.held_out for split in (data.validation, data.test))
    assert task.data() is data
