"""Splitting a batch into microbatches that go through the ranks one after the other, and joining their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


def cut(model: nn.Module, given: Arguments, count: int) -> list[Arguments]:
    """Return the arguments ``given`` to the model in ``count`` microbatches; single samples if there are fewer samples.

    Raises:
        ChainError: the tensors have no common first dimension, or the model mixes samples.
    """
    if count == 1:
        return [given]
    refuse_mixing(model)
    tensors = tensors_in(given)
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) != 1 or not next(iter(sizes)) or not len(tensors[0]):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "none at all"
        raise ChainError(
            f"microbatches={count} splits all input tensors of the model along their first dimension, which must be "
            f"the batch, but their shapes are: {shapes}. Make buffers of tensors for all samples, such as masks, or "
            "leave microbatches out."
        )
    columns = zip(*(t.tensor_split(min(count, len(t))) for t in tensors), strict=True)
    return [replaced(given, {id(t): part for t, part in zip(tensors, column, strict=True)}) for column in columns]


def refuse_mixing(model: nn.Module) -> None:
    """Raise if ``model`` has a batch normalization that uses the statistics of the batch."""
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ChainError(
                f"{path} is a {type(module).__name__} in training, whose statistics would be of a microbatch only. "
                "Call eval() on it, use another normalization, or leave microbatches out."
            )


def joined(given: Sequence[Arguments], parts: Sequence[Any]) -> Any:
    """Return the outputs of all microbatches, joined along the first dimension.

    Args:
        given: the arguments of each.
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
    for arguments, (_, row) in zip(given, found, strict=True):
        samples = len(tensors_in(arguments)[0])
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
