"""The user's data, returned by a function, and the task that trains on them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gradfree.benchmarks.data.bundled import Data, Split
from gradfree.benchmarks.records.case import ADDED
from gradfree.benchmarks.tasks.imported import Imported
from gradfree.benchmarks.tasks.metrics import LossMetric, ScoreMetric, accuracy
from gradfree.benchmarks.tasks.task import Score, Task, cross_entropy
from gradfree.cli import UsageError
from gradfree.devices.hardware import cpu_threads
from gradfree.torchside.random_state import RandomState
from gradfree.wording import did_you_mean, one

_SPLITS = Data._fields
_GIVEN = {1: ("train",), 2: ("train", "test"), 3: _SPLITS}
_CHUNK = 256
_STEPS = 200
_BATCH_SIZE = 32
_LEARNING_RATE = 1e-3


def own_task(
    model: str,
    options: Mapping[str, Any],
    data: str,
    loss: str | None,
    chains: Sequence[str] | None,
    score: str | None = None,
) -> Task:
    """Return the task for the user's model and data.

    Args:
        model: ``module:function``, which returns the model.
        options: options of this function.
        data: ``module:function``, which returns the examples: see :class:`Loaded`.
        loss: ``module:function``; by default cross-entropy for integer targets, else the squared error.
        chains: module paths of the chains; found automatically if not given.
        score: ``module:function`` of outputs and targets, of which higher is better; by default the accuracy for
            integer targets and no loss of the user's, else the loss.

    Raises:
        UsageError: a function does not exist or returns the wrong type.
    """
    loaded = Loaded(loader := Imported.find(data), _load(loader)[1])
    classes = not loaded().train.targets.is_floating_point()
    function: Callable[[Tensor, Tensor], Tensor] = cross_entropy if classes else squared_error
    if loss is not None:
        function = Imported.find(loss)
    scored = Score("loss", "mean", LossMetric(function))
    if score is not None:
        scored = Score(score.rpartition(":")[2], "mean", ScoreMetric(Imported.find(score)))
    elif loss is None and classes:
        scored = Score("accuracy", "%", accuracy, 100.0)
    return Task(
        name=model,
        data=loaded,
        model=model,
        options=options,
        loss=function,
        score=scored,
        learning_rate=_LEARNING_RATE,
        batch_size=min(_BATCH_SIZE, len(loaded().train.inputs)),
        steps=_STEPS,
        chains=None if chains is None else tuple(chains),
        builder=Imported.find(model),
    )


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error.

    Raises:
        ValueError: the shapes differ, so that torch would broadcast.
    """
    if outputs.shape != targets.shape:
        raise ValueError(f"the model's outputs are {tuple(outputs.shape)}, the targets {tuple(targets.shape)}.")
    return nn.functional.mse_loss(outputs, targets)


@dataclass(frozen=True)
class Loaded:
    """Examples returned by a function.

    The function is called with the global generators of Python, numpy and torch seeded, and on one thread. So a
    function that shuffles or augments with these generators returns the same examples in every process.

    Attributes:
        loader: returns one to three sources of examples, as a tuple or a mapping with keys "train", "validation" and
            "test". From a single source, a tenth each is held out for validation and test. Two are for training and
            test, and the last tenth of the first is held out for validation. A source is a pair of tensors (inputs,
            targets), a data set of such pairs, or an iterable of batches of them, such as a ``DataLoader``.
        examples: digest of the examples: cases with other examples have other records.
    """

    loader: Imported
    examples: str = field(default="", metadata=ADDED)

    def __call__(self) -> Data:
        """Return all examples, in memory.

        Raises:
            UsageError: the loader returns something else.
        """
        return _load(self.loader)[0]


@cache
def _load(loader: Imported) -> tuple[Data, str]:
    """Return the examples, and the digest of all before some are held out."""
    splits = _seeded_splits(loader)
    if not all(len(split.inputs) for split in splits.values()):
        raise UsageError(f"{loader.name} returns a source without examples.")
    data = Data(*_hold_out(splits["train"])) if len(splits) == 1 else Data(**_with_last_tenth(splits))
    if not len(data.train.inputs):
        raise UsageError(f"{loader.name} returns too few examples: all are held out, and none is left for training.")
    return data, _digest_of(splits)


def _digest_of(splits: Mapping[str, Split]) -> str:
    """Return a digest of the examples in each split."""
    digest = hashlib.blake2b()
    for name, split in splits.items():
        for x in split:
            digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
            # As bytes, since numpy does not have all of torch's dtypes.
            digest.update(x.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:8]


def _seeded_splits(loader: Imported) -> dict[str, Split]:
    """Call ``loader`` with seeded generators and one thread: the rounding of sums depends on the number of threads."""
    with RandomState().restored(), cpu_threads(1):
        random.seed(0)
        # The legacy generator, because users' loaders use it.
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        return {name: _split(source, loader.name) for name, source in sources(loader.result(), loader.name).items()}


def sources(given: Any, name: str) -> Mapping[str, Any]:
    """Return the sources that the loader ``name`` has ``given``, by split, the training examples first."""
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


def batches_of(source: Any, batch_size: int, name: str) -> Iterable[Any]:
    """Return the batches of a source: a pair of tensors, a data set, or an iterable that has them."""
    if is_pair(source):
        source = TensorDataset(*_batch(source, name))
    if isinstance(source, Dataset):
        return DataLoader(source, batch_size)
    if not isinstance(source, Iterable):
        raise UsageError(f"{name} returns {_described(source)}, not examples.")
    return source


def is_pair(value: Any) -> bool:
    """Return whether ``value`` is a pair of tensors, inputs and targets."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, Tensor) for x in value)


def _split(source: Any, name: str) -> Split:
    if is_pair(source):
        return _batch(source, name)
    found = []
    for batch in batches_of(source, _CHUNK, name):
        if not is_pair(batch):
            raise UsageError(f"{name} has a batch that is {_described(batch)}, not two tensors: inputs and targets.")
        found.append(_batch(batch, name))
    if not found:
        raise UsageError(f"{name} has no batch.")
    return Split(*(torch.cat(tensors) for tensors in zip(*found, strict=True)))


def _batch(pair: Sequence[Tensor], name: str) -> Split:
    """Return the pair as a split; raise if the numbers of inputs and targets differ."""
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
    """Return ``splits``; if one is missing, it is the last tenth of the training examples."""
    missing = [name for name in _SPLITS if name not in splits]
    if not missing:
        return dict(splits)
    inputs, targets = splits["train"]
    rest = len(inputs) - max(1, len(inputs) // 10)
    return {**splits, "train": Split(inputs[:rest], targets[:rest]), missing[0]: Split(inputs[rest:], targets[rest:])}
