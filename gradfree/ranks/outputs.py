"""What a model returns whose blocks lie on several ranks: only the last one computes it, all are given it.

Each rank computes the loss of it, which must be the same on all; the last one's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError
from gradfree.ranks.crossings import Sent
from gradfree.ranks.messages import OUTPUTS, Messages
from gradfree.ranks.microbatches import skeleton_of


def outputs_of_last(
    messages: Messages,
    number: int,
    check: Callable[[Sequence[Cotangent]], None],
    sent: Sequence[Tensor],
    device: torch.device,
    out: Any,
) -> Any:
    """Return what the model returns on the last rank, which sends it to all others.

    Args:
        messages: the ranks.
        number: of the pass.
        check: is given the outputs' cotangents in a backward pass.
        sent: the last states of this rank's blocks: every backward pass must reach them, as other ranks wait.
        device: where the outputs go.
        out: of the model, on the last rank.
    """
    if messages.count == 1:
        return out
    last, what = messages.count - 1, "the model's outputs"
    if messages.position == last:
        skeleton, tensors = skeleton_of(out)
        needing = [tensor.requires_grad for tensor in tensors]
        for other in range(last):
            messages.give(tensors, other, number, OUTPUTS, what, (skeleton, needing))
        messages.settle()
    else:
        tensors, (skeleton, needing) = messages.take(last, number, OUTPUTS, what, device)
    if torch.is_grad_enabled() and any(needing):
        tensors = Sent.apply(check, len(sent), needing, *sent, *tensors)
    return replaced(skeleton, {id(number): tensors[int(number)] for number in tensors_in(skeleton)})


def compare_loss(messages: Messages, cotangents: Sequence[Cotangent]) -> None:
    """Refuse a loss that is not the last rank's; all ranks call it in the same backward pass.

    Args:
        messages: the ranks.
        cotangents: of the model's outputs. Their norms are compared, to what devices may differ by.

    Raises:
        ChainError: they differ.
    """
    own = [-1.0 if c is None else float(torch.linalg.vector_norm(c)) for c in cotangents]
    its = messages.exchanged(own, "the gradients of the model's outputs")[-1]
    if not torch.allclose(torch.tensor(own), torch.tensor(its), rtol=1e-3, atol=0.0, equal_nan=True):
        error = ChainError(
            f"the loss is not that of the last rank: the gradients of the model's outputs have norms {own} here, {its} "
            "there. All ranks must be given the same batches and compute the same loss."
        )
        messages.report(error)
        raise error
