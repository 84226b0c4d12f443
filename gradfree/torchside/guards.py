"""Checks that refuse unsupported passes, and version marks that show whether values have changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradfree import errors
from gradfree.torchside.private import is_one_of_many, other_pass, transforms_active, version


def refuse_second_derivatives() -> None:
    """Raise if the running backward pass records a graph, ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise errors.SECOND_DERIVATIVES.error()


def refuse_transforms(where: str) -> None:
    """Raise if ``where`` runs in a transform of ``torch.func``, or in another pass that engines do not support."""
    if transforms_active():
        raise errors.TRANSFORM.error(where=where)
    if (other := other_pass()) is not None:
        raise errors.OTHER_PASS.error(where=where, other=other)


def refuse_batched(cotangents: Iterable[Tensor | None], where: str) -> None:
    """Raise if the backward pass runs for a batch of cotangents, ``is_grads_batched=True``."""
    if any(e is not None and is_one_of_many(e) for e in cotangents):
        raise errors.MANY_COTANGENTS.error(where=where)


def saved(ctx: FunctionCtx, where: str) -> tuple[Tensor, ...]:
    """Return the tensors that the forward pass of ``where`` has saved.

    Raises:
        ChainError: one of them was changed in place since.
    """
    try:
        return ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise errors.CHANGED_IN_PLACE.error(where=where) from error


def check_finite(cotangents: Iterable[Tensor | None], where: str) -> None:
    """Under anomaly detection, raise for NaN and inf at the output of ``where``.

    Without it there is no check: GradScaler must see these values, and the check costs a host sync.
    """
    if torch.is_anomaly_enabled() and not _finite(cotangents):
        raise errors.NOT_FINITE_BEHIND.error(where=where)


def check_made_finite(gradients: Iterable[Tensor | None], where: str) -> None:
    """Under anomaly detection, raise for NaN and inf that ``where`` has produced from finite cotangents."""
    if torch.is_anomaly_enabled() and not _finite(gradients):
        raise errors.NOT_FINITE_INSIDE.error(where=where)


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(t is None or bool(t.isfinite().all()) for t in tensors)


Marks = list[tuple[object, int]]
"""For each value its identity and, if it is a tensor, its version counter."""


def marks_of(values: Iterable[object]) -> Marks:
    """Return the marks of ``values``."""
    return [(weakref.ref(v), version(v)) if isinstance(v, Tensor) else (v, 0) for v in values]


def unchanged(marks: Marks, others: Marks) -> bool:
    """Return whether two lists of marks belong to the same, unchanged values."""
    return len(marks) == len(others) and all(a is b and m == n for (a, m), (b, n) in zip(marks, others, strict=True))


def unlike_any() -> Marks:
    """Return marks that differ from all others."""
    return [(object(), 0)]


def held_marks(cell: nn.Module) -> Marks:
    """Return the marks of everything in the cell, besides parameters, that its output may depend on."""
    values = [value for module in cell.modules() for value in vars(module).values()]
    return marks_of(part for value in values for part in _parts(value) if not isinstance(part, nn.Parameter))


def _parts(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
