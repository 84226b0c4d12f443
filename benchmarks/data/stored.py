"""Data sets on disk, one folder each, in the format of the Hugging Face hub."""

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

if TYPE_CHECKING:
    from datasets import DatasetDict

DATA_ROOT = "GRADFREE_DATA"
"""Environment variable with the folder that contains all sets (the data root)."""

Arrays: TypeAlias = tuple[np.ndarray, ...]
"""The arrays of a split, as they are cached on disk."""

_DOWNLOADS = {
    "cifar10": "uoft-cs/cifar10",
    "mnist": "ylecun/mnist",
    "tinyshakespeare": "karpathy/tiny_shakespeare --revision refs/convert/parquet",
    "wikitext-2": "Salesforce/wikitext --include 'wikitext-2-v1/*'",
}


@dataclass(frozen=True)
class Stored(ABC):
    """Examples of a set in the data root.

    Decoded images and tokenized texts are cached as arrays, beside the cache of ``datasets`` in the folder
    ``gradfree`` of ``$HF_HOME``. The cache is invalid once the set's files, this code or the packages that read them
    change.

    Attributes:
        name: name of the set and of its folder.
    """

    name: str

    def __call__(self) -> Data:
        """Return the examples."""
        return _load(self, self.folder())

    @abstractmethod
    def read(self, splits: DatasetDict) -> Mapping[str, Arrays]:
        """Return the arrays of each split, to be cached."""

    @abstractmethod
    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return the examples, given the cached arrays."""

    def folder(self) -> Path:
        """Return the set's folder.

        Raises:
            UsageError: it is missing; the message has the command that downloads it.
            MissingExtra: a package that reads it is missing.
        """
        require("bench", "datasets", "joblib", "tokenizers", "PIL")
        root = os.environ.get(DATA_ROOT)
        if not root:
            problem = f"{DATA_ROOT} is not set to the folder of the sets, for example DATA"
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


def _state(stored: Stored, folder: Path) -> object:
    """Return the rest of the cache key: the files' state, the code, and the versions of the packages that read them."""
    import datasets
    import tokenizers

    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
    code = [Path(file).read_text(encoding="utf-8") for file in (inspect.getfile(type(stored)), __file__)]
    return stats, code, datasets.__version__, tokenizers.__version__
