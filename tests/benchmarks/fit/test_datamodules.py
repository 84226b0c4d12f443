"""Data modules of ``gradfree fit``: examples are shared between devices, texts cut as asked."""

import pytest
import torch
from datasets import Dataset

from gradfree.benchmarks.data.stored import DATA_ROOT
from gradfree.benchmarks.fit import datamodules as lightning_data

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def test_devices_share_the_examples_between_them(monkeypatch):
    """No example twice, none left out but what fills no batch; validation examples are Lightning's to share."""
    data = lightning_data.Digits(batch_size=50)
    data.setup("fit")
    total = len(data.data.train.inputs)
    data.data = data.data._replace(train=(torch.arange(total), torch.zeros(total)))
    seen = []
    for rank in range(3):
        data.trainer = type("Trainer", (), {"world_size": 3, "global_rank": rank})()
        loader = data.train_dataloader()
        assert len(loader) == total // 3 // 50
        seen += [int(x) for inputs, _ in loader for x in inputs]
    assert len(set(seen)) == len(seen) == 3 * 50 * len(loader)


def test_stored_texts_are_cut_as_the_options_say(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ROOT, str(tmp_path))
    kinds = {"tinyshakespeare": lightning_data.TinyShakespeare, "wikitext-2": lightning_data.WikiText2}
    for folder, kind in kinds.items():
        (tmp_path / folder).mkdir()
        for split in ("train", "validation", "test"):
            rows = Dataset.from_dict({"text": ["a b a b"]})
            rows.to_parquet(str(tmp_path / folder / f"{split}-00000-of-00001.parquet"))
        data = kind(length=3)
        data.setup("fit")
        assert data.data.train.inputs.shape[1] == 3
