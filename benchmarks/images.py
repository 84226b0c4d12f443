"""Stored images with their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset, DatasetDict

from gradfree.benchmarks.case import ADDED
from gradfree.benchmarks.data import Data, Split
from gradfree.benchmarks.stored import Arrays, Stored


@dataclass(frozen=True)
class Images(Stored):
    """A stored set's first training images, its last ones to choose by, and all of its test images.

    Attributes:
        name: of the set and its folder; its splits "train" and "test" have columns of images and of classes.
        column: with the images.
        train: number of images to train on.
        validation: number of those to choose by.
        label: column with the classes.
    """

    column: str
    train: int
    validation: int
    label: str = field(default="label", metadata=ADDED)

    def read(self, splits: DatasetDict) -> dict[str, Arrays]:
        """Return the pixels and classes of each part."""
        train, total = splits["train"], len(splits["train"])
        chosen = {"train": range(self.train), "validation": range(total - self.validation, total)}
        parts = {name: train.select(numbers) for name, numbers in chosen.items()} | {"test": splits["test"]}
        return {name: self._arrays(part) for name, part in parts.items()}

    def _arrays(self, part: Dataset) -> Arrays:
        pixels = np.stack([np.asarray(image) for image in part[self.column]])
        # Grey images have no dimension of channels.
        pixels = pixels[:, None] if pixels.ndim == 3 else np.ascontiguousarray(np.moveaxis(pixels, -1, 1))
        return pixels, np.array(part[self.label])

    def arrange(self, arrays: Mapping[str, Arrays]) -> Data:
        """Return images (N, C, H, W), by the training images' mean 0 and variance 1, and classes (N,)."""
        pixels = {name: torch.from_numpy(images).float() for name, (images, _) in arrays.items()}
        mean, std = pixels["train"].mean(), pixels["train"].std()
        return Data(**{name: Split((x - mean) / std, torch.from_numpy(arrays[name][1])) for name, x in pixels.items()})
