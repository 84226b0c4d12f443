"""Stored images with their classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from datasets import Dataset

from gradfree.benchmarks.data import Data, Split
from gradfree.benchmarks.stored import Stored, open_set


@dataclass(frozen=True)
class Images(Stored):
    """A stored set's first training images, its last ones to choose by, and all of its test images.

    Attributes:
        name: of the set and its folder; its splits "train" and "test" have columns of images, called ``column``, and
            of classes.
        column: with the images.
        train: number of images to train on.
        validation: number of those to choose by.
    """

    label: ClassVar[str] = "label"
    """The column with the classes."""
    column: str
    train: int
    validation: int

    def __call__(self) -> Data:
        """Return images (N, C, H, W), by the training images' mean 0 and variance 1, and classes (N,)."""
        return _decode(self, self.folder())


@dataclass(frozen=True)
class FineImages(Images):
    """The same for a set with coarse classes and fine ones, which are taken."""

    label: ClassVar[str] = "fine_label"


@cache
def _decode(images: Images, folder: Path) -> Data:
    splits = open_set(folder)
    train, total = splits["train"], len(splits["train"])
    chosen = range(images.train), range(total - images.validation, total)
    parts = (*(train.select(numbers) for numbers in chosen), splits["test"])
    decoded = [_split(part, images) for part in parts]
    mean, std = decoded[0].inputs.mean(), decoded[0].inputs.std()
    return Data(*(Split((inputs - mean) / std, targets) for inputs, targets in decoded))


def _split(part: Dataset, images: Images) -> Split:
    pixels = torch.from_numpy(np.stack([np.asarray(image, dtype=np.float32) for image in part[images.column]]))
    # Grey images have no dimension of channels.
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.movedim(-1, 1).contiguous()
    return Split(pixels, torch.tensor(part[images.label]))
