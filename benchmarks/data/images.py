"""Stored images with their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.data.stored import Arrays, Stored, check_columns, check_splits, with_all_splits
from gradfree.benchmarks.records.case import ADDED
from gradfree.cli import UsageError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from PIL.Image import Image


@dataclass(frozen=True)
class LabelledImages(Stored):
    """All images of a set; if it has none for validation or test, a tenth of the training images each, drawn once.

    Attributes:
        name: of the set and its folder.
        column: with the images.
        label: column with the classes.
        side: of the square that images are scaled to, cut at their middles; 0: they are all of one size.
    """

    column: str
    label: str = field(default="label", metadata=ADDED, kw_only=True)
    side: int = field(default=0, metadata=ADDED, kw_only=True)

    def parts(self, splits: DatasetDict) -> Mapping[str, Dataset]:
        """Return the rows to train on, to choose by and to report."""
        return with_all_splits(splits, shuffled=True)

    def read(self, splits: DatasetDict) -> dict[str, Arrays]:
        """Return the pixels and classes of each part; of grey images among others in colour.

        Raises:
            UsageError: a column is not there, a file is no image, or the images differ in size.
        """
        from PIL import UnidentifiedImageError

        check_columns(self.name, splits, self.column, self.label)
        parts = self.parts(splits)
        try:
            images = {name: list(part[self.column]) for name, part in parts.items()}
        except UnidentifiedImageError as error:
            raise UsageError(f"{self.name} has a file that is no image: {error}") from None
        every = [image for part in images.values() for image in part]
        sizes = sorted({image.size for image in every})
        if len(sizes) > 1 and not self.side:
            told = ", ".join(f"{width}×{height}" for width, height in sizes[:3])
            raise UsageError(f"{self.name}: the images differ in size, {told}: scale them to squares, side: 32, say.")
        coloured = len({image.mode for image in every}) > 1
        return {
            name: (
                np.stack([_pixels(image, coloured, self.side) for image in images[name]]),
                np.array(part[self.label]),
            )
            for name, part in parts.items()
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
        check_splits(self.name, splits, "train", "test")
        train, total = splits["train"], len(splits["train"])
        if total < (needed := self.train + self.validation):
            raise UsageError(
                f"{self.name} has {total} images to train on, and {needed} are needed: the set is not whole."
            )
        chosen = {"train": range(self.train), "validation": range(total - self.validation, total)}
        return {name: train.select(numbers) for name, numbers in chosen.items()} | {"test": splits["test"]}


def _pixels(image: Image, coloured: bool, side: int) -> np.ndarray:
    """Return an image as (channels, height, width)."""
    from PIL import ImageOps

    image = image.convert("RGB") if coloured else image
    pixels = np.asarray(ImageOps.fit(image, (side, side)) if side else image)
    # Grey images have no dimension of channels.
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
