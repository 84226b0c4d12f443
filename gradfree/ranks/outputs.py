"""What a model returns whose blocks lie on several ranks: only the last one computes it, all are given it.

Each rank computes the loss of it, which must be the same on all; the last one's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError
from gradfree.ranks.crossings import Sent
from gradfree.ranks.messages import Messages
from gradfree.ranks.microbatches import skeleton_of

Check = Callable[[Sequence[Cotangent]], None]
"""What is given the outputs' cotangents in a backward pass."""
_WHAT = "the model's outputs"


def give_outputs(messages: Messages, check: Check, sent: Sequence[Tensor], reached: Sequence[Tensor], out: Any) -> Any:
    """Send all ranks what the model returns on the last one; return it.

    Args:
        messages: the ranks.
        check: is given the outputs' cotangents.
        sent: the last states of this rank's blocks: every backward pass must reach them, as other ranks wait.
        reached: what else backward passes must come by.
        out: of the model.
    """
    if messages.count == 1:
        return out
    skeleton, tensors = skeleton_of(out)
    needing = [tensor.requires_grad for tensor in tensors]
    messages.give_all(tensors, _WHAT, (skeleton, needing))
    return _joined(check, sent, reached, needing, tensors, skeleton)


def take_outputs(
    messages: Messages, check: Check, sent: Sequence[Tensor], reached: Sequence[Tensor], device: torch.device
) -> Any:
    """Return what the last rank gives all; the arguments are those of :func:`give_outputs`."""
    tensors, (skeleton, needing) = messages.take_all(messages.count - 1, _WHAT, device)
    return _joined(check, sent, reached, needing, tensors, skeleton)


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


def _joined(
    check: Check,
    sent: Sequence[Tensor],
    reached: Sequence[Tensor],
    needing: Sequence[bool],
    tensors: Sequence[Tensor],
    skeleton: Any,
) -> Any:
    """Return the outputs such that backward passes through them lead to all that has sent."""
    if torch.is_grad_enabled() and any(needing):
        # The engine itself asks for the cotangents of the states.
        zeros = [*(state.new_zeros(()).expand(state.shape) for state in sent), *(None for _ in reached)]
        ends, returned = [*sent, *reached], partial(_checked, check, zeros)
        tensors = Sent.apply(returned, len(ends), needing, *ends, *tensors)
    return replaced(skeleton, {id(number): tensors[int(number)] for number in tensors_in(skeleton)})


def _checked(check: Check, zeros: Sequence[Cotangent], cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
    check(cotangents)
    return zeros
