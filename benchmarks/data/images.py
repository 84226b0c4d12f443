"""Stored images with their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset, DatasetDict

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.data.stored import Arrays, Stored, with_all_splits
from gradfree.benchmarks.records.case import ADDED
from gradfree.cli import UsageError


@dataclass(frozen=True)
class LabelledImages(Stored):
    """All images of a set; if it has none for validation or test, a tenth of the training images each, drawn once.

    Attributes:
        name: of the set and its folder.
        column: with the images, all of one size.
        label: column with the classes.
    """

    column: str
    label: str = field(default="label", metadata=ADDED, kw_only=True)

    def parts(self, splits: DatasetDict) -> Mapping[str, Dataset]:
        """Return the rows to train on, to choose by and to report."""
        return with_all_splits(splits, shuffled=True)

    def read(self, splits: DatasetDict) -> dict[str, Arrays]:
        """Return the pixels and classes of each part.

        Raises:
            UsageError: the images differ in size.
        """
        parts = self.parts(splits)
        images = {name: [np.asarray(image) for image in part[self.column]] for name, part in parts.items()}
        sizes = {image.shape for part in images.values() for image in part}
        if len(sizes) > 1:
            raise UsageError(f"{self.name}: the images differ in size: {', '.join(map(str, sorted(sizes)[:3]))}.")
        return {
            name: (_channels_first(np.stack(images[name])), np.array(part[self.label])) for name, part in parts.items()
        }

    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return images (N, C, H, W), by the training images' mean 0 and variance 1, and classes (N,)."""
        pixels = {name: torch.from_numpy(images).float() for name, (images, _) in arrays.items()}
        mean, std = pixels["train"].mean(), pixels["train"].std()
        return Data(**{name: Split((x - mean) / std, torch.from_numpy(arrays[name][1])) for name, x in pixels.items()})


@dataclass(frozen=True)
class Images(LabelledImages):
    """A stored set's first training images, its last ones to choose by, and all of its test images.

    Attributes:
        train: number of images to train on.
        validation: number of those to choose by.
    """

    train: int
    validation: int

    def parts(self, splits: DatasetDict) -> Mapping[str, Dataset]:
        """Return the rows to train on, to choose by and to report."""
        train, total = splits["train"], len(splits["train"])
        chosen = {"train": range(self.train), "validation": range(total - self.validation, total)}
        return {name: train.select(numbers) for name, numbers in chosen.items()} | {"test": splits["test"]}


def _channels_first(pixels: np.ndarray) -> np.ndarray:
    # Grey images have no dimension of channels.
    return pixels[:, None] if pixels.ndim == 3 else np.ascontiguousarray(np.moveaxis(pixels, -1, 1))
