"""Data sets on disk, one folder each, in the format of the Hugging Face hub, and those of images."""

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
import torch

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.cli import UsageError
from gradfree.extras import require

if TYPE_CHECKING:
    from datasets import DatasetDict
    from PIL.Image import Image

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
    ``gradfree`` of ``$HF_HOME``. The cache is invalid once the set's files, the code of its class or ``datasets``
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
            problem = f"{DATA_ROOT} is not set to the folder of the sets, for example DATA, and --data does not name it"
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

    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))]
    code = Path(inspect.getfile(type(stored))).read_text(encoding="utf-8")
    read = Memory(Path(datasets.config.HF_CACHE_HOME, "gradfree"), verbose=0).cache(_read, ignore=["folder"])
    return stored.arrange(read(stored, folder, (files, code, datasets.__version__)))


def _read(stored: Stored, folder: Path, state: object) -> Mapping[str, Arrays]:
    import datasets

    datasets.disable_progress_bars()
    return stored.read(datasets.load_dataset(str(folder)))


@dataclass(frozen=True)
class Images(Stored):
    """A stored image set: its first training images, its last training images for validation, and all test images.

    Attributes:
        name: name of the set and of its folder.
        column: column of the images.
        train: number of training images.
        validation: number of validation images.
    """

    column: str
    train: int
    validation: int

    def read(self, splits: DatasetDict) -> dict[str, Arrays]:
        """Return the pixels and classes of each part.

        Raises:
            UsageError: some images are missing.
        """
        train, total = splits["train"], len(splits["train"])
        if total < (needed := self.train + self.validation):
            raise UsageError(
                f"{self.name} has {total} images to train on, and {needed} are needed: the set is incomplete."
            )
        parts = {
            "train": train.select(range(self.train)),
            "validation": train.select(range(total - self.validation, total)),
            "test": splits["test"],
        }
        return {
            name: (np.stack([_pixels(image) for image in part[self.column]]), np.array(part["label"]))
            for name, part in parts.items()
        }

    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return images (N, C, H, W), normalised by the training images' mean and variance, and classes (N,)."""
        pixels = {name: torch.from_numpy(images).float() for name, (images, _) in arrays.items()}
        mean, std = pixels["train"].mean(), pixels["train"].std()
        return Data(**{name: Split((x - mean) / std, torch.from_numpy(arrays[name][1])) for name, x in pixels.items()})


def _pixels(image: Image) -> np.ndarray:
    """Return an image as (channels, height, width)."""
    pixels = np.asarray(image)
    # Grey images have no channel dimension.
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
