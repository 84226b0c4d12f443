"""Cutting a batch into parts that go through the ranks one behind the other, and joining what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError

Given = tuple[tuple[Any, ...], dict[str, Any]]


def cut(model: nn.Module, given: Given, count: int) -> list[Given]:
    """Return what the model is ``given`` in ``count`` parts, in one for each sample if there are fewer of these.

    Args:
        model: the model.
        given: its arguments, by position and by keyword. All tensors in them are cut along their first dimension.
        count: of parts.

    Raises:
        ChainError: tensors of no batch, or not all of one; a model that mixes samples.
    """
    if count == 1:
        return [given]
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ChainError(
                f"{path} is a {type(module).__name__} in training, whose statistics would be those of a microbatch. "
                "Call eval() on it, use another normalization, or leave microbatches out."
            )
    tensors = tensors_in(given)
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) != 1 or not next(iter(sizes)) or not len(tensors[0]):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "none at all"
        raise ChainError(
            f"microbatches={count} cuts all tensors that the model is given along their first dimension, that of one "
            f"batch, but their shapes are: {shapes}. Expand what has no such dimension, make it inside the model, or "
            "leave microbatches out."
        )
    parts = [t.tensor_split(min(count, len(t))) for t in tensors]
    columns = zip(*parts, strict=True)
    return [replaced(given, {id(t): own for t, own in zip(tensors, column, strict=True)}) for column in columns]


def joined(given: Sequence[Given], parts: Sequence[Any]) -> Any:
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
    for its, (_, row) in zip(given, found, strict=True):
        samples = len(tensors_in(its)[0])
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
