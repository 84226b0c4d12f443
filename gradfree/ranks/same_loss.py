"""Whether all ranks have computed the same loss, of which the last one's alone counts."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import torch

from gradfree.algebra.cotangents import Cotangent
from gradfree.errors import ChainError
from gradfree.ranks.messages import LOSS, Messages


def compare_loss(messages: Messages, number: int, cotangents: Sequence[Cotangent]) -> None:
    """Refuse a loss that is not the last rank's; all ranks call it in the same backward pass.

    Args:
        messages: the ranks.
        number: of the pass.
        cotangents: of the model's outputs. Their norms are compared, to what devices may differ by.

    Raises:
        ChainError: they differ.
    """
    own = [None if c is None else float(torch.linalg.vector_norm(c)) for c in cotangents]
    last, what = messages.count - 1, "what the loss makes of the model's outputs"
    if messages.position == last:
        for rank in range(last):
            messages.send_note(own, rank, number, LOSS, what)
        return
    its = messages.receive_note(last, number, LOSS, what)
    if not all(map(_alike, own, its)):
        error = ChainError(
            f"the loss is not that of the last rank: the gradients of the model's outputs have norms {own} here, {its} "
            "there. All ranks must be given the same batches and compute the same loss."
        )
        messages.tell(error)
        raise error


def _alike(own: float | None, its: float | None) -> bool:
    if own is None or its is None:
        return own is its
    return own == its or (isnan(own) and isnan(its)) or abs(own - its) <= 1e-3 * max(own, its)
