"""Cutting a batch into parts that go through the ranks one behind the other, and joining what they come to."""

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
    """What a model is given for one part of a batch.

    Attributes:
        args: by position.
        kwargs: by keyword.
        samples: how many there are in it; 0 where the batch is not cut.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    samples: int = 0


class Cutter:
    """Cuts what a model is given.

    Args:
        forward: the model's own.
        count: of parts.
        uncut: the names of arguments that each part is given as they are.

    Raises:
        TypeError: ``uncut`` is one name, not several.
        ChainError: a number that is none, names that ``forward`` does not have.
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
        """Return the parts of what a model is given, one for each sample if there are fewer of these.

        Raises:
            ChainError: tensors of no batch, or not all of one; a model that mixes samples.
        """
        if self._count == 1:
            return [BatchPart(args, kwargs)]
        refuse_mixing(model)
        # Behind those that have a name of their own come the arguments of *args.
        names = [*self._positional[: len(args)], *range(len(self._positional), len(args))]
        given = dict(zip(names, args, strict=True)) | kwargs
        cut = {name: value for name, value in given.items() if name not in self._uncut}
        columns = [(given | part, samples) for part, samples in parts_of(cut, self._count)]
        return [
            BatchPart(tuple(own[n] for n in names), {n: own[n] for n in kwargs}, samples) for own, samples in columns
        ]


def refuse_mixing(model: nn.Module) -> None:
    """Refuse a model that takes statistics of a whole batch."""
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ChainError(
                f"{path} is a {type(module).__name__} in training, whose statistics would be those of a microbatch. "
                "Call eval() on it, use another normalization, or leave microbatches out."
            )


def parts_of(given: dict[Any, Any], count: int) -> list[tuple[dict[Any, Any], int]]:
    """Return ``given`` with all its tensors cut into ``count`` parts, each with the number of its samples."""
    tensors = tensors_in(given)
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) != 1 or not next(iter(sizes)) or not len(tensors[0]):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "none at all"
        raise ChainError(
            f"microbatches={count} cuts all tensors that the model is given along their first dimension, that of one "
            f"batch, but their shapes are: {shapes}. Name the arguments that each part is to be given as they are, "
            "uncut=['mask'], or leave microbatches out."
        )
    parts = [t.tensor_split(min(count, len(t))) for t in tensors]
    return [
        (replaced(given, {id(t): own for t, own in zip(tensors, column, strict=True)}), len(column[0]))
        for column in zip(*parts, strict=True)
    ]


def joined(given: Sequence[BatchPart], parts: Sequence[Any]) -> Any:
    """Return what a model has returned for the parts of a batch as what it returns for the whole.

    Args:
        given: what the model was given for each.
        parts: what it has returned.

    Raises:
        ChainError: outputs that are not of the samples, or not known to be.
    """
    if len(parts) == 1:
        return parts[0]
    (first, tensors), *rest = found = [skeleton_of(part) for part in parts]
    if any(type(own) is not type(first) or bool(own != first) for own, _ in rest):
        raise ChainError(
            f"microbatches: the model has returned a {type(parts[0]).__name__} of which more than tensors differs from "
            "one microbatch to the next. Return tensors, in tuples, lists, dictionaries or dataclasses, or leave "
            "microbatches out."
        )
    for (*_, samples), (_, row) in zip(given, found, strict=True):
        for wrong in (t for t in row if t.shape[:1] != (samples,)):
            raise ChainError(
                f"microbatches: the model has returned a tensor of shape {tuple(wrong.shape)} for {samples} samples, "
                "which cannot be joined along its first dimension. Compute losses and means behind the model, let "
                "its outputs begin with the dimension of the samples, or leave microbatches out."
            )
    columns = zip(*(row for _, row in found), strict=True)
    return replaced(parts[0], {id(t): torch.cat(column) for t, column in zip(tensors, columns, strict=True)})


def skeleton_of(out: Any) -> tuple[Any, list[Tensor]]:
    """Return ``out`` with numbers in the places of its tensors, and these tensors."""
    tensors = tensors_in(out)
    return replaced(out, {id(tensor): torch.tensor(n) for n, tensor in enumerate(tensors)}), tensors
