"""Real data that need no download."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

CONTEXT = 64
"""Length of the sequences of :func:`pydoc`."""


class Split(NamedTuple):
    """Examples: row i of ``targets`` belongs to row i of ``inputs``."""

    inputs: Tensor
    targets: Tensor


class Data(NamedTuple):
    """The examples for training, validation and test."""

    train: Split
    validation: Split
    test: Split


def digits() -> Data:
    """Return scikit-learn's digits: 1797 images of 8×8 pixels, a fifth each for validation and test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    rest, test = train_test_split(range(len(classes)), test_size=360, stratify=classes, random_state=0)
    train, validation = train_test_split(rest, test_size=360, stratify=classes[rest], random_state=0)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = (images - images[train].mean()) / images[train].std()
    labels = torch.tensor(classes)
    return Data(*(Split(images[part], labels[part]) for part in (train, validation, test)))


def pydoc() -> Data:
    """Return Python's help texts as character sequences, split by topic; they depend on the version of Python.

    Tokens are ASCII codes, "?" for any other character.
    """
    names = sorted(topics)
    random.Random(0).shuffle(names)
    test, validation, train = (_paragraphs(part) for part in (names[:8], names[8:16], names[16:]))
    # Topics quote each other: remove held-out paragraphs from the training topics.
    held_out = set(test)
    validation = [paragraph for paragraph in validation if paragraph not in held_out]
    held_out.update(validation)
    train = [paragraph for paragraph in train if paragraph not in held_out]
    texts = ("\n\n".join(part).encode("ascii", "replace") for part in (train, validation, test))
    return Data(*(windows(torch.tensor(list(text)), CONTEXT) for text in texts))


def _paragraphs(names: Sequence[str]) -> list[str]:
    return [paragraph for name in names for paragraph in re.split(r"\n\s*\n", topics[name].strip())]


def windows(tokens: Tensor, length: int) -> Split:
    """Return consecutive sequences of ``length`` tokens, with the next tokens as targets; the remainder is dropped."""
    both = tokens.unfold(0, length + 1, length)
    return Split(both[:, :-1], both[:, 1:])


@dataclass(frozen=True)
class Joined:
    """A text's sequences joined to longer ones; the remainder is dropped.

    Attributes:
        data: returns consecutive sequences.
        count: number of sequences that are joined to one.
    """

    data: Callable[[], Data]
    count: int

    def __call__(self) -> Data:
        """Return the long sequences."""
        return Data(*(Split(*map(self._join, split)) for split in self.data()))

    def _join(self, x: Tensor) -> Tensor:
        return x[: len(x) // self.count * self.count].reshape(-1, self.count * x.shape[1])
