"""The benchmarks' data as LightningDataModules; what reads them is imported when they are read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from jsonargparse.typing import PositiveInt
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradfree.extras import needs_extra
from gradfree.lightning import ResumableLoader

if TYPE_CHECKING:
    from gradfree.benchmarks.data.bundled import Data, Split


class Examples(pl.LightningDataModule, ABC):
    """Batches of inputs and targets, each epoch in an order that depends on nothing but the seed and the epoch.

    A training that is resumed goes on with the batch that it would have had. What does not fill a batch is left out
    of the epoch.

    Args:
        batch_size: examples a step on each device.
    """

    def __init__(self, batch_size: PositiveInt = 64):
        super().__init__()
        self.batch_size = batch_size
        # Where Lightning's own samplers take it from.
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))

    @abstractmethod
    def load(self) -> Data:
        """Return the examples."""

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

    def load(self) -> Data:
        """Return the examples."""
        from gradfree.benchmarks.data.bundled import digits

        return digits()


class PyDoc(Examples):
    """Python's own help texts, sequences of 64 characters, 128 different ones."""

    def load(self) -> Data:
        """Return the examples."""
        from gradfree.benchmarks.data.bundled import pydoc

        return pydoc()


class MNIST(Examples):
    """Handwritten digits, (1, 28, 28), in ten classes, from the folder $GRADFREE_DATA/mnist."""

    def load(self) -> Data:
        """Return the examples."""
        from gradfree.benchmarks.data.images import Images

        return Images("mnist", column="image", train=58000, validation=2000)()


class CIFAR10(Examples):
    """Photographs, (3, 32, 32), in ten classes, from the folder $GRADFREE_DATA/cifar10."""

    def load(self) -> Data:
        """Return the examples."""
        from gradfree.benchmarks.data.images import Images

        return Images("cifar10", column="img", train=48000, validation=2000)()


class TinyShakespeare(Examples):
    """Shakespeare's plays, characters, 66 different ones, from the folder $GRADFREE_DATA/tinyshakespeare.

    Args:
        batch_size: sequences a step on each device.
        length: of the sequences.
    """

    def __init__(self, batch_size: PositiveInt = 16, length: PositiveInt = 128):
        super().__init__(batch_size)
        self.length = length

    def load(self) -> Data:
        """Return the examples."""
        from gradfree.benchmarks.data.text import Text

        return Text("tinyshakespeare", unit="character", vocabulary=66, length=self.length, held_out=1000)()


class WikiText2(Examples):
    """Wikipedia articles, words, from the folder $GRADFREE_DATA/wikitext-2.

    Args:
        batch_size: sequences a step on each device.
        length: of the sequences.
        vocabulary: number of words that are told apart, the most frequent ones.
    """

    def __init__(self, batch_size: PositiveInt = 16, length: PositiveInt = 64, vocabulary: PositiveInt = 8000):
        super().__init__(batch_size)
        self.length, self.vocabulary = length, vocabulary

    def load(self) -> Data:
        """Return the examples."""
        from gradfree.benchmarks.data.text import Text

        return Text("wikitext-2", unit="word", vocabulary=self.vocabulary, length=self.length, held_out=1000)()
