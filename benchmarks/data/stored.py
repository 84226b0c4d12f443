"""Data sets on this machine, one folder of files each, as the Hugging Face hub has them."""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from gradfree.benchmarks.data.bundled import Data
from gradfree.cli import UsageError
from gradfree.extras import require
from gradfree.wording import no_such

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

DATA_ROOT = "GRADFREE_DATA"
"""Environment variable with the folder of all sets."""

Arrays: TypeAlias = tuple[np.ndarray, ...]
"""One array or several of a split, as they are kept on disk."""

_DOWNLOADS = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "mnist": "ylecun/mnist",
    "ptb": "ptb-text-only/ptb_text_only --revision refs/convert/parquet",
    "tinyshakespeare": "karpathy/tiny_shakespeare --revision refs/convert/parquet",
    "wikitext-2": "Salesforce/wikitext --include 'wikitext-2-v1/*'",
}


@dataclass(frozen=True)
class Stored(ABC):
    """Examples from a set in the data root.

    What takes long to read, images to decode and texts to tokenize, is read once: arrays are kept beside what
    ``datasets`` keeps, in the folder ``gradfree`` of ``$HF_HOME``, until the set's files, this code or the packages
    that read them change.

    Attributes:
        name: of the set and its folder.
    """

    name: str

    def __call__(self) -> Data:
        """Return the examples."""
        return _load(self, self.folder())

    @abstractmethod
    def read(self, splits: DatasetDict) -> Mapping[str, Arrays]:
        """Return what to keep of each split."""

    @abstractmethod
    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return the examples that were read as ``arrays``."""

    def folder(self) -> Path:
        """Return the set's folder.

        Raises:
            UsageError: it is not there; the message says how to get it.
            MissingExtra: a package that reads it is not.
        """
        require("bench", "datasets", "joblib", "tokenizers", "PIL")
        root = os.environ.get(DATA_ROOT)
        if not root:
            problem = f"{DATA_ROOT} does not name the folder of the sets, say DATA"
            raise self._missing(problem, Path("DATA", self.name))
        folder = Path(root, self.name)
        if not any(folder.rglob("*.parquet")):
            raise self._missing(f"{folder} has no parquet files", folder)
        return folder

    def _missing(self, problem: str, folder: Path) -> UsageError:
        download = f"hf download --repo-type dataset {_DOWNLOADS[self.name]} --local-dir {folder}"
        return UsageError(f"the set {self.name} is needed, but {problem}. Do: {download}")


@cache
def _load(stored: Stored, folder: Path) -> Data:
    import datasets
    from joblib import Memory

    read = Memory(Path(datasets.config.HF_CACHE_HOME, "gradfree"), verbose=0).cache(_read, ignore=["folder"])
    return stored.arrange(read(stored, folder, _state(stored, folder)))


def _read(stored: Stored, folder: Path, state: object) -> Mapping[str, Arrays]:
    import datasets

    datasets.disable_progress_bars()
    return stored.read(datasets.load_dataset(str(folder)))


def check_splits(name: str, splits: DatasetDict, *needed: str) -> None:
    """Refuse a set without one of the ``needed`` splits."""
    for split in needed:
        if split not in splits:
            raise UsageError(
                f"{name} has no split {split}, but {', '.join(splits)}; files are named by their split, "
                f"{split}.parquet, say."
            )


def check_columns(name: str, splits: DatasetDict, *needed: str) -> None:
    """Refuse a set whose training rows lack one of the ``needed`` columns."""
    check_splits(name, splits, "train")
    known = splits["train"].column_names
    for column in needed:
        if column not in known:
            raise UsageError(f"{name}: {no_such('column', column, known)}")


def with_all_splits(splits: DatasetDict) -> dict[str, Dataset]:
    """Return the training, validation and test rows; what is missing of the others is the last tenth of the first."""
    found = {name: splits[name] for name in ("train", "validation", "test") if name in splits}
    tenth = len(splits["train"]) // 10
    for name in ("test", "validation"):
        if name not in found:
            parts = found["train"].train_test_split(test_size=tenth, shuffle=False)
            found |= {"train": parts["train"], name: parts["test"]}
    return found


def _state(stored: Stored, folder: Path) -> object:
    """Return what the arrays depend on besides ``stored``: files, code and the packages that read."""
    import datasets
    import tokenizers

    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
    code = [Path(file).read_text(encoding="utf-8") for file in (inspect.getfile(type(stored)), __file__)]
    return stats, code, datasets.__version__, tokenizers.__version__
