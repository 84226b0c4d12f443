"""Checks that refuse unsupported passes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gradfree import errors
from gradfree.torchside.private import assert_on_device, is_one_of_many, is_simulated, other_pass, transforms_active


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


def check_finite(
    tensors: Iterable[Tensor | None], where: str, refusal: errors.Refusal = errors.NOT_FINITE_BEHIND
) -> None:
    """Under anomaly detection, raise ``refusal`` for NaN and inf: by default for those at the output of ``where``.

    Without it there is no check: GradScaler must see these values, and the check costs a host sync.
    """
    if torch.is_anomaly_enabled() and not all(t is None or bool(t.isfinite().all()) for t in tensors):
        raise refusal.error(where=where)


def are_near(actual: Tensor, expected: Tensor, rounding: float) -> Tensor:
    """Return whether values differ by at most ``rounding`` of the largest expected one, unless that is not finite."""
    largest = expected.abs().amax()
    return ((actual - expected).abs().amax() <= rounding * largest) | ~largest.isfinite()


def refuse_other_values(actual: Tensor, expected: Tensor, rounding: float, message: str, wait: bool = False) -> None:
    """Raise if values that were computed again differ from those of the forward pass, unless these are not finite.

    On a GPU this is an assertion on the device, so that the host does not wait.

    Args:
        actual: the new values.
        expected: the values of the forward pass.
        rounding: the largest difference allowed, relative to the largest expected value.
        message: of the error.
        wait: whether the host waits, for an error on a GPU that tells where it happened.
    """
    if not expected.numel() or is_simulated(expected):
        return
    same = are_near(actual, expected, rounding)
    if wait and not same:
        raise errors.ChainError(message)
    refuse_unless(same, message)


def refuse_unless(condition: Tensor, message: str) -> None:
    """Raise if ``condition`` is false; on a GPU by an assertion on the device, so that the host does not wait."""
    try:
        assert_on_device(condition, message)
    except RuntimeError:  # A CPU raises at once.
        raise errors.ChainError(message) from None
