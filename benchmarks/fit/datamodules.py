"""The benchmarks' data as LightningDataModules; what reads them is imported when they are read."""

from __future__ import annotations

import os
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import lightning.pytorch as pl
import torch
from jsonargparse.typing import PositiveInt
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradfree.extras import needs_extra
from gradfree.lightning import ResumableLoader

if TYPE_CHECKING:
    from gradfree.benchmarks.data.bundled import Data, Split


class Examples(pl.LightningDataModule):
    """Inputs and targets of a task, each epoch in an order that depends on nothing but the seed and the epoch.

    A training that is resumed goes on with the batch that it would have had. What does not fill a batch is left out
    of the epoch.

    Args:
        batch_size: examples a step on each device.

    Attributes:
        task: where it is.
        sizes: of the data, where they are not the task's.
    """

    task: ClassVar[str]

    def __init__(self, batch_size: PositiveInt = 64):
        super().__init__()
        self.batch_size = batch_size
        self.sizes: dict[str, int] = {}
        # Where Lightning's own samplers take it from.
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    def load(self) -> Data:
        """Return the examples."""
        data = resolve_name(f"gradfree.benchmarks.{self.task}").data
        examples: Data = (replace(data, **self.sizes) if self.sizes else data)()
        return examples

    def setup(self, stage: str) -> None:
        """Load the examples.

        Raises:
            UsageError: they are not there.
            MissingExtra: a package that reads them is not.
        """
        with needs_extra("bench"):
            self.data = self.load()

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the part of the training examples that is this process's.

        Raises:
            ValueError: it does not fill a batch.
        """
        assert self.trainer is not None
        examples = TensorDataset(*self.data.train)
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        sampler: DistributedSampler[Any] = DistributedSampler(examples, ranks, rank, seed=self.seed, drop_last=True)
        if len(sampler) < self.batch_size:
            raise ValueError(f"batch_size is {self.batch_size}, but each device has {len(sampler)} examples.")
        return ResumableLoader(examples, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the examples to choose by."""
        return self._in_order(self.data.validation)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the examples to report."""
        return self._in_order(self.data.test)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed."""
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the same orders, whatever the seed of this run."""
        self.seed = state_dict["seed"]

    def _in_order(self, split: Split) -> DataLoader[Any]:
        # A generator of its own: validation must not move the training's random numbers on.
        return DataLoader(TensorDataset(*split), self.batch_size, generator=torch.Generator())


class Digits(Examples):
    """Scikit-learn's handwritten digits, (1, 8, 8), in ten classes."""

    task = "tasks.catalogue:DIGITS"


class PyDoc(Examples):
    """Python's own help texts, sequences of 64 characters, 128 different ones."""

    task = "tasks.catalogue:PYDOC"


class MNIST(Examples):
    """Handwritten digits, (1, 28, 28), in ten classes, from the folder $GRADFREE_DATA/mnist."""

    task = "suites.long_sequences:MNIST_PIXELS"


class CIFAR10(Examples):
    """Photographs, (3, 32, 32), in ten classes, from the folder $GRADFREE_DATA/cifar10."""

    task = "suites.long_sequences:CIFAR10_PIXELS"


class TinyShakespeare(Examples):
    """Shakespeare's plays, characters, 66 different ones, from the folder $GRADFREE_DATA/tinyshakespeare.

    Args:
        batch_size: sequences a step on each device.
        length: of the sequences.
    """

    task = "tasks.catalogue:TINYSHAKESPEARE"

    def __init__(self, batch_size: PositiveInt = 16, length: PositiveInt = 128):
        super().__init__(batch_size)
        self.sizes = {"length": length}


class WikiText2(Examples):
    """Wikipedia articles, words, from the folder $GRADFREE_DATA/wikitext-2.

    Args:
        batch_size: sequences a step on each device.
        length: of the sequences.
        vocabulary: number of words that are told apart, the most frequent ones.
    """

    task = "tasks.catalogue:WIKITEXT2"

    def __init__(self, batch_size: PositiveInt = 16, length: PositiveInt = 64, vocabulary: PositiveInt = 8000):
        super().__init__(batch_size)
        self.sizes = {"length": length, "vocabulary": vocabulary}
