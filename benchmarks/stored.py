"""Data sets on this machine, one folder of parquet files each, as the Hugging Face hub has them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from datasets import DatasetDict, disable_progress_bars, load_dataset

from gradfree.benchmarks.data import Data
from gradfree.cli import UsageError

DATA_ROOT = "GRADFREE_DATA"
"""Environment variable with the folder of all sets."""

_DOWNLOADS = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "mnist": "ylecun/mnist",
    "ptb": "ptb-text-only/ptb_text_only --revision refs/convert/parquet",
    "tinyshakespeare": "karpathy/tiny_shakespeare --revision refs/convert/parquet",
    "wikitext-103-raw": "Salesforce/wikitext --include 'wikitext-103-raw-v1/*'",
    "wikitext-2": "Salesforce/wikitext --include 'wikitext-2-v1/*'",
}


@dataclass(frozen=True)
class Stored(ABC):
    """Examples from a set in the data root.

    Attributes:
        name: of the set and its folder.
    """

    name: str

    @abstractmethod
    def __call__(self) -> Data:
        """Return the examples."""

    def folder(self) -> Path:
        """Return the set's folder.

        Raises:
            UsageError: it is not there; the message says how to get it.
        """
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


def open_set(folder: Path) -> DatasetDict:
    """Return the splits in ``folder`` by name."""
    disable_progress_bars()
    return load_dataset(str(folder))
