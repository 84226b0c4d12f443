"""What a model returns whose blocks lie on several ranks: only the last one computes it, all are given it.

Each rank computes the loss of it, which must be the same on all; the last one's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError
from gradfree.ranks.crossings import Departed
from gradfree.ranks.messages import LOSS, Messages
from gradfree.ranks.microbatches import skeleton_of
from gradfree.ranks.rank_pass import RankPass

Check = Callable[[Sequence[Cotangent]], None]
_WHAT = "the model's outputs"


class AllOutputs:
    """The outputs of one batch, which goes through the ranks as a whole or in parts.

    Args:
        messages: the ranks.
        check: is given the outputs' cotangents in a backward pass.
    """

    def __init__(self, messages: Messages, check: Check):
        self._messages, self._check = messages, check
        self._last = messages.count - 1

    def give(self, passes: Sequence[RankPass], reached: Sequence[Tensor], out: Any) -> Any:
        """Send all ranks ``out``, to which ``passes`` have come on the last one; return it.

        Args:
            passes: of the batch.
            reached: what backward passes must come by, too.
            out: of the model.
        """
        departed = [its.departed() for its in passes]
        if self._last == 0:
            return out
        skeleton, tensors = skeleton_of(out)
        needing = [tensor.requires_grad for tensor in tensors]
        self._messages.give_all(tensors, _WHAT, (skeleton, needing))
        # Other ranks wait for cotangents: every backward pass through an output must reach this rank's chain.
        return _filled(skeleton, self._joined(departed, reached, needing, tensors))

    def take(self, passes: Sequence[RankPass], reached: Sequence[Tensor], device: torch.device) -> Any:
        """Return what the last rank gives all, where this one's ``passes`` have gone on to the next."""
        tensors, (skeleton, needing) = self._messages.take_all(self._last, _WHAT, device)
        departed = [its.departed() for its in passes]
        return _filled(skeleton, self._joined(departed, reached, needing, tensors))

    def _joined(
        self, departed: Sequence[Tensor], reached: Sequence[Tensor], needing: Sequence[bool], tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the outputs such that backward passes through them lead to all that has departed."""
        if not (torch.is_grad_enabled() and any(needing)):
            return tensors
        zeros = [*(state.new_zeros(()).expand(state.shape) for state in departed), *(None for _ in reached)]
        ends, returned = [*departed, *reached], partial(_returned, self._check, zeros)
        found: Sequence[Tensor] = Departed.apply(returned, len(ends), needing, *ends, *tensors)
        return found


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
        messages.report(error)
        raise error


def _alike(own: float | None, its: float | None) -> bool:
    if own is None or its is None:
        return own is its
    return own == its or (isnan(own) and isnan(its)) or abs(own - its) <= 1e-3 * max(own, its)


def _returned(check: Check, zeros: Sequence[Cotangent], cotangents: Sequence[Cotangent]) -> Sequence[Cotangent]:
    """Check the outputs' cotangents; the engine itself asks for those of the states that have departed."""
    check(cotangents)
    return zeros


def _filled(skeleton: Any, found: Sequence[Tensor]) -> Any:
    """Return ``skeleton`` with the tensors whose numbers it holds."""
    return replaced(skeleton, {id(number): found[int(number)] for number in tensors_in(skeleton)})
