"""Data of the user's own, which a function returns, and how to train on them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import set_torch_threads
from torch.utils.data import DataLoader, Dataset

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.data.digests import examples_digest
from gradfree.benchmarks.records.case import ADDED
from gradfree.benchmarks.tasks.imported import Builder, Imported
from gradfree.benchmarks.tasks.metrics import LossMetric, accuracy
from gradfree.benchmarks.tasks.task import Score, Task, cross_entropy
from gradfree.cli import UsageError
from gradfree.torchside.random_state import random_states_kept
from gradfree.wording import did_you_mean, one

if TYPE_CHECKING:
    from typing_extensions import Self

_SPLITS = ("train", "validation", "test")
_GIVEN = {1: ("train",), 2: ("train", "test"), 3: _SPLITS}
_AT_ONCE = 256
_STEPS = 200
_BATCH_SIZE = 32
_LEARNING_RATE = 1e-3


def own_task(model: str, options: Mapping[str, Any], data: str, loss: str | None, chains: Sequence[str] | None) -> Task:
    """Return the training job of a model and data of the user's own; what is not said is guessed from the targets.

    Args:
        model: what builds it, ``module:function``.
        options: of the builder.
        data: what returns them, as :class:`Loaded` has it.
        loss: ``module:function``; if not given, cross-entropy for targets of whole numbers, else the squared error.
        chains: module paths; found automatically if not given.

    Raises:
        UsageError: something is not there or not of the kind.
    """
    loaded = Loaded.by(Imported.to(data))
    classes = not loaded().train.targets.is_floating_point()
    function: Callable[[Tensor, Tensor], Tensor] = cross_entropy if classes else squared_error
    if loss is not None:
        function = Imported.to(loss)
    by_classes = loss is None and classes
    return Task(
        name=model,
        data=loaded,
        model=model,
        options=options,
        loss=function,
        score=Score("accuracy", "%", accuracy, 100.0) if by_classes else Score("loss", "mean", LossMetric(function)),
        learning_rate=_LEARNING_RATE,
        batch_size=min(_BATCH_SIZE, len(loaded().train.inputs)),
        steps=_STEPS,
        chains=None if chains is None else tuple(chains),
        builder=Builder.to(model),
    )


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error.

    Raises:
        ValueError: the shapes differ; torch would broadcast them.
    """
    if outputs.shape != targets.shape:
        raise ValueError(f"the model's outputs are {tuple(outputs.shape)}, the targets {tuple(targets.shape)}.")
    return nn.functional.mse_loss(outputs, targets)


@dataclass(frozen=True)
class Loaded:
    """Examples that a function returns.

    It is called with all random numbers seeded and on one thread, so that every process has the same examples: a
    loader that shuffles or augments by the global random numbers of Python, numpy or torch does so alike each time.

    Attributes:
        loader: returns one source of examples, of which a tenth each is held out for validation and test; two, for
            training and test, of whose first the last tenth is held out for validation; or three, in a tuple or by
            their names: train, validation, and test. A source is a pair of tensors, inputs and targets, a data set of
            such pairs or an iterable of batches of them, a ``DataLoader``, say.
        examples: digest of what it returns: records of other examples are not these one's. The order does not count.
            Nothing where the examples are others each time: then a change to them is not seen, but one to the loader.
    """

    loader: Imported
    examples: str = field(default="", metadata=ADDED)

    @classmethod
    def by(cls, loader: Imported) -> Self:
        """Return the examples with their digest; a message says if they have none.

        Raises:
            UsageError: the loader returns something else.
        """
        return cls(loader, _digest(loader))

    def __call__(self) -> Data:
        """Return the examples, all in memory.

        Raises:
            UsageError: the loader returns something else.
        """
        return _load(self.loader)[0]


@cache
def _digest(loader: Imported) -> str:
    """Return the digest of what ``loader`` returns twice, or nothing."""
    digest = _load(loader)[1]
    if examples_digest(_drawn(loader)) == digest:
        return digest
    print(
        f"{loader.name} returns other examples each time: a change to the data will not be noticed, and finished cases "
        "are kept until its code changes. Draw random numbers from a seed.",
        file=sys.stderr,
    )
    return ""


@cache
def _load(loader: Imported) -> tuple[Data, str]:
    """Return the examples and their digest before any are held out."""
    splits = _drawn(loader)
    if not all(len(split.inputs) for split in splits.values()):
        raise UsageError(f"{loader.name} returns a source without examples.")
    data = Data(*_hold_out(splits["train"])) if len(splits) == 1 else Data(**_with_last_tenth(splits))
    if not len(data.train.inputs):
        raise UsageError(
            f"{loader.name} returns too few examples: nothing is left to train on beside what is held out."
        )
    return data, examples_digest(splits)


def _drawn(loader: Imported) -> dict[str, Split]:
    """Return the splits that ``loader`` returns by seeded random numbers, on one thread: sums depend on how many."""
    with torch.random.fork_rng(devices=[]), random_states_kept(), set_torch_threads(1):
        random.seed(0)
        # What users' loaders draw from, old as it is.
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        return {name: _split(source, loader.name) for name, source in _sources(loader.result(), loader.name).items()}


def _sources(given: Any, name: str) -> Mapping[str, Any]:
    """Return what the loader gave by the names of the splits, the training examples first."""
    if isinstance(given, Mapping):
        for key in given:
            if key not in _SPLITS:
                hint = did_you_mean(str(key), _SPLITS)
                raise UsageError(f"{name} has the key {key!r}; the keys are {', '.join(_SPLITS)}.{hint}")
        if "train" not in given:
            raise UsageError(f"{name} returns no examples to train on: the key 'train' is missing.")
        return {split: given[split] for split in _SPLITS if split in given}
    if not isinstance(given, tuple) or is_pair(given):
        return {"train": given}
    if len(given) not in _GIVEN:
        raise UsageError(f"{name} must return one to three sources of examples, not {len(given)}.")
    return dict(zip(_GIVEN[len(given)], given, strict=True))


def is_pair(value: Any) -> bool:
    """Tell whether ``value`` is two tensors, inputs and targets."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, Tensor) for x in value)


def _split(source: Any, name: str) -> Split:
    if is_pair(source):
        return _batch(source, name)
    batches: Iterable[Any] = source
    if isinstance(source, Dataset) and not isinstance(source, DataLoader):
        batches = DataLoader(source, _AT_ONCE)
    elif not isinstance(source, Iterable):
        raise UsageError(f"{name} returns {_described(source)}, not examples.")
    found = []
    for batch in batches:
        if not is_pair(batch):
            raise UsageError(f"{name} has a batch that is {_described(batch)}, not two tensors: inputs and targets.")
        found.append(_batch(batch, name))
    if not found:
        raise UsageError(f"{name} has no batch.")
    return Split(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))


def _batch(pair: Sequence[Tensor], name: str) -> Split:
    """Return a pair as a batch."""
    inputs, targets = pair
    if not (inputs.ndim and targets.ndim and len(inputs) == len(targets)):
        raise UsageError(
            f"{name} has inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}: the first "
            "size must be the number of examples in both. Of a list of single examples make a DataLoader."
        )
    return Split(inputs, targets)


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{one(type(value).__name__)} of {', '.join(type(item).__name__ for item in value)}"
    return one(type(value).__name__)


def _hold_out(split: Split) -> list[Split]:
    order = torch.randperm(len(split.inputs), generator=torch.Generator().manual_seed(0))
    tenth = max(1, len(order) // 10)
    parts = order[2 * tenth :], order[:tenth], order[tenth : 2 * tenth]
    return [Split(split.inputs[part], split.targets[part]) for part in parts]


def _with_last_tenth(splits: Mapping[str, Split]) -> dict[str, Split]:
    """Return ``splits`` with the last tenth of the training examples for the one that is missing, if any."""
    missing = [name for name in _SPLITS if name not in splits]
    if not missing:
        return dict(splits)
    inputs, targets = splits["train"]
    rest = len(inputs) - max(1, len(inputs) // 10)
    return {**splits, "train": Split(inputs[:rest], targets[:rest]), missing[0]: Split(inputs[rest:], targets[rest:])}
