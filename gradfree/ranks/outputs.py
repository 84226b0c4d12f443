"""Outputs of a model across ranks: the last rank computes them and sends them to all others.

Each rank computes the loss from them. It must be the same on all ranks; gradients come from that of the last rank.
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


def share_outputs(
    messages: Messages,
    number: int,
    check: Callable[[Sequence[Cotangent]], None],
    sent: Sequence[Tensor],
    device: torch.device,
    out: Any,
) -> Any:
    """Return the model's output on all ranks; the last rank sends it to the others.

    Args:
        messages: connects the ranks.
        number: of the pass.
        check: called with the outputs' cotangents in a backward pass.
        sent: the last states of this rank's blocks; every backward pass must reach them, because other ranks wait.
        device: of the outputs.
        out: the model's output on the last rank; ignored on the others.
    """
    if messages.count == 1:
        return out
    last, what = messages.count - 1, "the model's outputs"
    if messages.position == last:
        skeleton, tensors = skeleton_of(out)
        needing = [tensor.requires_grad for tensor in tensors]
        for other in range(last):
            messages.send_all(tensors, other, number, OUTPUTS, what, (skeleton, needing))
        messages.settle()
    else:
        tensors, (skeleton, needing) = messages.receive_all(last, number, OUTPUTS, what, device)
    if torch.is_grad_enabled() and any(needing):
        tensors = Sent.apply(check, len(sent), needing, *sent, *tensors)
    return replaced(skeleton, {id(number): tensors[int(number)] for number in tensors_in(skeleton)})


def compare_loss(messages: Messages, cotangents: Sequence[Cotangent]) -> None:
    """Check that this rank's loss is that of the last rank. All ranks call this in the same backward pass.

    Args:
        messages: connects the ranks.
        cotangents: of the model's outputs. Their norms are compared, to a tolerance for different devices.

    Raises:
        ChainError: the norms differ.
    """
    here = [-1.0 if c is None else float(torch.linalg.vector_norm(c)) for c in cotangents]
    last = messages.all_gather(here, "the gradients of the model's outputs")[-1]
    if not torch.allclose(torch.tensor(here), torch.tensor(last), rtol=1e-3, atol=0.0, equal_nan=True):
        raise ChainError(
            f"the loss is not that of the last rank: the gradients of the model's outputs have norms {here} here, "
            f"{last} there. All ranks must get the same batches and compute the same loss."
        )
