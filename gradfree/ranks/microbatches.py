"""Splitting a batch into microbatches that go through the ranks one after the other, and joining their outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError


class BatchPart(NamedTuple):
    """The model's arguments for one microbatch.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        samples: the number of samples; 0 if the batch is not split.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int = 0


class Cutter:
    """Splits the arguments of a model into microbatches.

    Args:
        forward: the model's.
        count: the number of microbatches.
        uncut: the names of arguments that are not split.

    Raises:
        TypeError: ``uncut`` is a string, not a list of names.
        ChainError: ``count`` is no positive int, or ``forward`` has no argument of a name in ``uncut``.
    """

    def __init__(self, forward: Callable[..., Any], count: int, uncut: Collection[str]):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ChainError(f"microbatches must be a number of parts, 1 or more, not {count!r}.")
        if isinstance(uncut, str):
            raise TypeError(f"uncut is a list of names: uncut=[{uncut!r}].")
        parameters = inspect.signature(forward).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._positional = [p.name for p in named if p.kind != p.KEYWORD_ONLY]
        self._count, self._uncut = count, uncut
        if wrong := set(uncut) - {p.name for p in named}:
            there = ", ".join(p.name for p in named)
            raise ChainError(f"uncut names {min(wrong)!r}, but the model's forward has {there}.")

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BatchPart]:
        """Return the microbatches; single samples if there are fewer samples than microbatches.

        Raises:
            ChainError: the tensors have no common first dimension, or the model mixes samples.
        """
        if self._count == 1:
            return [BatchPart(args, kwargs)]
        refuse_mixing(model)
        # Arguments of *args have no names: they get their positions.
        names = [*self._positional[: len(args)], *range(len(self._positional), len(args))]
        given = dict(zip(names, args, strict=True)) | kwargs
        cut = {name: value for name, value in given.items() if name not in self._uncut}
        parts = [(given | part, samples) for part, samples in parts_of(cut, self._count)]
        return [
            BatchPart(tuple(part[n] for n in names), {n: part[n] for n in kwargs}, samples) for part, samples in parts
        ]


def refuse_mixing(model: nn.Module) -> None:
    """Raise if ``model`` has a batch normalization that uses the statistics of the batch."""
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ChainError(
                f"{path} is a {type(module).__name__} in training, whose statistics would be of a microbatch only. "
                "Call eval() on it, use another normalization, or leave microbatches out."
            )


def parts_of(given: dict[Any, Any], count: int) -> list[tuple[dict[Any, Any], int]]:
    """Return ``count`` parts of ``given``, with a slice of each of its tensors, and the number of samples of each."""
    tensors = tensors_in(given)
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) != 1 or not next(iter(sizes)) or not len(tensors[0]):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "none at all"
        raise ChainError(
            f"microbatches={count} splits all input tensors of the model along their first dimension, which must be "
            f"the batch, but their shapes are: {shapes}. Name the arguments that must not be split, uncut=['mask'], or "
            "leave microbatches out."
        )
    parts = [t.tensor_split(min(count, len(t))) for t in tensors]
    return [
        (replaced(given, {id(t): part for t, part in zip(tensors, column, strict=True)}), len(column[0]))
        for column in zip(*parts, strict=True)
    ]


def joined(given: Sequence[BatchPart], parts: Sequence[Any]) -> Any:
    """Return the outputs of all microbatches, joined along the first dimension.

    Args:
        given: the microbatches.
        parts: the model's output for each.

    Raises:
        ChainError: an output's first dimension is not the batch, or outputs differ in more than tensors.
    """
    if len(parts) == 1:
        return parts[0]
    (first, tensors), *rest = found = [skeleton_of(part) for part in parts]
    if any(type(other) is not type(first) or bool(other != first) for other, _ in rest):
        raise ChainError(
            f"microbatches: the model has returned a {type(parts[0]).__name__} with values other than tensors that "
            "differ from one microbatch to the next. Return tensors, in tuples, lists, dictionaries or dataclasses, or "
            "leave microbatches out."
        )
    for (*_, samples), (_, row) in zip(given, found, strict=True):
        for wrong in (t for t in row if t.shape[:1] != (samples,)):
            raise ChainError(
                f"microbatches: the model has returned a tensor of shape {tuple(wrong.shape)} for {samples} samples, "
                "which cannot be joined along its first dimension. Compute losses and means after the model, make the "
                "batch the first dimension of its outputs, or leave microbatches out."
            )
    columns = zip(*(row for _, row in found), strict=True)
    return replaced(parts[0], {id(t): torch.cat(column) for t, column in zip(tensors, columns, strict=True)})


def skeleton_of(out: Any) -> tuple[Any, list[Tensor]]:
    """Return ``out`` with indices in place of its tensors, and these tensors."""
    tensors = tensors_in(out)
    return replaced(out, {id(tensor): torch.tensor(n) for n, tensor in enumerate(tensors)}), tensors
