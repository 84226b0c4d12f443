"""What a pass through an engine refuses, and marks that tell whether values are still what they were."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradfree.errors import ChainError
from gradfree.torchside.private import is_one_of_many, other_pass, transforms_active, version


def refuse_second_derivatives() -> None:
    """Raise if the running backward pass records a graph of its own, ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise ChainError(
            "create_graph=True: an engine's gradients have no derivatives of their own. Detach the handle for the "
            "passes that need second derivatives (gradient penalties)."
        )


def refuse_transforms(where: str) -> None:
    """Raise if ``where`` runs in a transform of ``torch.func``, or in another pass that an engine has no part in."""
    if transforms_active():
        raise ChainError(
            f"{where} runs inside a transform of torch.func (grad, vmap, jvp, ...), which an engine's passes do not go "
            "through. Detach the engine for it, or call loss.backward() or torch.autograd.grad."
        )
    if (other := other_pass()) is not None:
        raise ChainError(f"{where} runs in {other}, which an engine's passes do not go through. Detach it first.")


def refuse_batched(cotangents: Iterable[Tensor | None], where: str) -> None:
    """Raise if a backward pass is run for many cotangents at once, ``is_grads_batched=True``."""
    if any(e is not None and is_one_of_many(e) for e in cotangents):
        raise ChainError(
            f"the backward pass through {where} is run for many cotangents at once (is_grads_batched=True, "
            "vectorize=True), which an engine does not do. Run it for one after the other, or detach the engine."
        )


def saved(ctx: FunctionCtx, where: str) -> tuple[Tensor, ...]:
    """Return what the forward pass of ``where`` has saved.

    Raises:
        ChainError: some of it was changed in place since.
    """
    try:
        return ctx.saved_tensors  # type: ignore[attr-defined]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise changed_in_place(where) from error


def changed_in_place(where: str) -> ChainError:
    """Return the error that says that what a pass of ``where`` has run with, or given, has changed since."""
    return ChainError(
        f"the input, the initial state, the weights or the output of {where} were changed in place between the "
        "forward and the backward pass, which needs them. Use the out-of-place operation (out = out + x, not "
        "out += x), and step the optimizer after the backward pass."
    )


def check_finite(cotangents: Iterable[Tensor | None], where: str) -> None:
    """Under anomaly detection, refuse NaN and inf at the output of ``where``.

    Elsewhere they pass: GradScaler must see them, and to look costs a host sync.
    """
    if torch.is_anomaly_enabled() and not _finite(cotangents):
        raise ChainError(f"non-finite cotangent at the output of {where}: NaN or inf comes from behind it.")


def check_made_finite(gradients: Iterable[Tensor | None], where: str) -> None:
    """Under anomaly detection, refuse NaN and inf that ``where`` itself made of finite cotangents."""
    if torch.is_anomaly_enabled() and not _finite(gradients):
        raise ChainError(
            f"non-finite gradient in {where}: NaN or inf is in its input, its initial state or its weights, or an "
            "overflow made it."
        )


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(t is None or bool(t.isfinite().all()) for t in tensors)


Marks = list[tuple[object, int]]
"""What tells whether values are still the same: their identities, of tensors also the counts of changes in place."""


def marks_of(values: Iterable[object]) -> Marks:
    """Return marks of what ``values`` are now."""
    return [(weakref.ref(v), version(v)) if isinstance(v, Tensor) else (v, 0) for v in values]


def unchanged(marks: Marks, others: Marks) -> bool:
    """Tell whether two marks are of the same values."""
    return len(marks) == len(others) and all(a is b and m == n for (a, m), (b, n) in zip(marks, others, strict=True))


def unlike_any() -> Marks:
    """Return marks that no others are like."""
    return [(object(), 0)]


def held_marks(cell: nn.Module) -> Marks:
    """Return marks of what the cell's output may depend on besides its arguments and parameters."""
    values = [value for module in cell.modules() for value in vars(module).values()]
    parts = [part for value in values for part in (value.values() if isinstance(value, dict) else [value])]
    return marks_of(part for part in parts if not isinstance(part, nn.Parameter))
