"""Stored sets: how they are found, and how a text becomes sequences."""

import os
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, Value
from joblib._store_backends import CacheWarning, StoreBackendMixin
from tiny_suite import HIGHWAY, PLAIN, training

from gradfree.benchmarks.data import stored
from gradfree.benchmarks.data.images import Images
from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.data.text import Text
from gradfree.benchmarks.suites.forward_only import FORWARD_ONLY
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.published import Beside
from gradfree.benchmarks.tasks.catalogue import TINYSHAKESPEARE, WIKITEXT2
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.cli import UsageError, main

CHARACTERS = Text("tiny", unit="character", vocabulary=5, length=3, held_out=2)
WORDS = Text("tiny", unit="word", vocabulary=4, length=2, held_out=9)


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


def test_pieces_are_bytes_and_what_stands_together_most_often(root):
    """256 bytes in the alphabet's order, then " a" + "b" and the like; nothing is unknown."""
    store(root, train=["ab ab ab ab"], validation=["ab ab ab ab"], test=["é ab ab"])
    pieces = Text("tiny", unit="piece", vocabulary=258, length=2, held_out=9)
    train, _, test = pieces()
    first, again, *_ = train.inputs.flatten().tolist()
    assert (first, again) == (256, 257)
    assert test.inputs.flatten().tolist()[0] < 256
    assert train.targets[0].tolist() == [257, 257]


def test_a_set_is_read_once_and_then_from_disk(root, monkeypatch):
    """Another process starts with nothing in memory, and decodes and tokenizes nothing."""
    store(root, train=["abcabc"], validation=["abc"], test=["cba"])
    first = CHARACTERS()
    stored._load.cache_clear()
    monkeypatch.setattr(Text, "read", None)
    for again, before in zip(CHARACTERS(), first, strict=True):
        assert again is not before
        assert torch.equal(again.inputs, before.inputs)
        assert torch.equal(again.targets, before.targets)


def test_a_set_whose_files_or_settings_change_is_read_anew(root):
    store(root, train=["aab"] * 3, validation=["ab a b"], test=["ab a b"])
    before = CHARACTERS().train.inputs
    assert replace(CHARACTERS, unit="word", length=1)().train.inputs.tolist() != before.tolist()
    Dataset.from_dict({"text": ["bbbbbaa"]}).to_parquet(str(root / "tiny" / "train-00000-of-00001.parquet"))
    stored._load.cache_clear()
    assert CHARACTERS().train.inputs.tolist() == [[1, 1, 1], [1, 1, 2]]


def test_a_disk_without_room_costs_time_and_no_data(root, monkeypatch):
    store(root, train=["abcabc"], validation=["abc"], test=["cba"])

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(StoreBackendMixin, "_concurrency_safe_write", full)
    with pytest.warns(CacheWarning, match="No space left on device"):
        assert len(CHARACTERS().train.inputs) == 2


def test_a_text_that_fills_no_sequence_is_refused(root):
    store(root, train=["abcabc"], validation=["ab"], test=["cba"])
    with pytest.raises(UsageError, match="tiny: validation has 3 tokens, fewer than length 3 \\+ 1"):
        CHARACTERS()


@pytest.mark.parametrize("name", ["dsf-wikitext-small", "foton-depth-small"])
def test_suites_name_the_sets_that_are_to_be_got(root, name):
    for part in SUITES[name]:
        if not isinstance(part, Beside):
            with pytest.raises(UsageError, match=f"hf download .* --local-dir {root}"):
                part.check()


def test_a_suite_of_stored_sets_alone_says_what_is_missing(tmp_path, monkeypatch, capsys):
    """Where others leave out what needs a folder of sets, nothing would be left of this one."""
    monkeypatch.setenv(DATA_ROOT, "")
    with pytest.raises(SystemExit):
        main(["bench", "run", "--suite", "foton-depth-small", "--out", str(tmp_path)])
    assert "the set mnist is needed, but GRADFREE_DATA does not name" in capsys.readouterr().err


def test_the_fine_classes_are_taken(root):
    (root / "tiny").mkdir()
    features = Features({"img": Image(), "fine_label": Value("int64"), "coarse_label": Value("int64")})
    for name in ("train", "test"):
        pixels = [np.full((2, 2, 3), n, dtype=np.uint8) for n in range(3)]
        rows = {"img": pixels, "fine_label": [7, 8, 9], "coarse_label": [0, 0, 1]}
        Dataset.from_dict(rows, features=features).to_parquet(str(root / "tiny" / f"{name}-00000-of-00001.parquet"))
    data = Images("tiny", column="img", train=2, validation=1, label="fine_label")()
    assert [split.targets.tolist() for split in data] == [[7, 8], [9], [7, 8, 9]]


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
    problem = "nowhere/tinyshakespeare has no parquet files" if "--data" in command else "name the folder of the sets"
    assert "the set tinyshakespeare is needed, but" in line
    assert problem in line
    assert "hf download --repo-type dataset karpathy/tiny_shakespeare" in line
    assert not (tmp_path / "results").exists()


def test_a_set_without_files_is_missing(root):
    (root / "wikitext-2").mkdir()
    with pytest.raises(UsageError, match=rf"{root}/wikitext-2 has no parquet files. Do: .* Salesforce/wikitext .*"):
        WIKITEXT2.data()


@pytest.mark.processes
@pytest.mark.slow
def test_workers_find_the_data_that_the_option_names(root, tmp_path_factory, monkeypatch, capsys):
    store(root, train=["abcd" * 20], validation=["abcd" * 2], test=["abcd" * 2])
    monkeypatch.setenv(DATA_ROOT, "elsewhere")
    task = replace(TINYSHAKESPEARE, data=CHARACTERS, options={"vocab_size": 5, "width": 4}, batch_size=4, steps=5)
    monkeypatch.setitem(SUITES, "tiny", (Comparison(task, (PLAIN, HIGHWAY)),))
    out = tmp_path_factory.mktemp("out")
    main(["bench", "run", "--suite", "tiny", "--out", str(out), "--seeds", "1", "--data", str(root)])
    assert "test perplexity" in (out / "report.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(DATA_ROOT not in os.environ, reason=f"{DATA_ROOT} is not set")
@pytest.mark.parametrize("part", [part for part in FORWARD_ONLY if part.optional])
def test_the_real_images_fit_their_models(part):
    data, model = part.task.data(), next(iter(part.comparisons.values())).task.create_model(0)
    assert model.float()(data.test.inputs[:2]).shape == (2, 10)
    assert [len(split.inputs) for split in data] == [part.task.data.train, part.task.data.validation, 10000]
    assert all(split.targets.unique().tolist() == list(range(10)) for split in data)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("given", "columns", "message"),
    [
        (
            Images("mnist", column="image", train=8, validation=2),
            {"image": [1] * 10, "label": [0] * 10},
            r"mnist has no split test, but train; .*test\.parquet",
        ),
        (
            Images("mnist", column="image", train=8, validation=2),
            {"img": [1] * 10, "label": [0] * 10},
            r"mnist: no column is called 'image'; there are: img",
        ),
        (
            Text("wikitext-2", unit="word", vocabulary=9, length=4, held_out=1),
            {"texts": ["a"] * 10},
            r"wikitext-2: no column is called 'text'; .* mean 'texts'",
        ),
    ],
)
def test_a_set_of_another_layout_is_refused_with_what_it_has(given, columns, message):
    splits = DatasetDict(train=Dataset.from_dict(columns))
    with pytest.raises(UsageError, match=message):
        given.read(splits)
