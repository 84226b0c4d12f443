"""Stored image data sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.data.stored import Arrays, Stored
from gradfree.cli import UsageError

if TYPE_CHECKING:
    from datasets import DatasetDict
    from PIL.Image import Image


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
