"""What a model returns whose blocks lie on several ranks: the last one alone computes it, all are given it.

The loss that each computes of it must be the same, of which the last one's alone counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isnan
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent
from gradfree.depth.ports import replaced, tensors_in
from gradfree.errors import ChainError
from gradfree.ranks.crossings import Departed, HandedOut
from gradfree.ranks.messages import LOSS, Halt, Messages
from gradfree.ranks.microbatches import skeleton_of
from gradfree.ranks.rank_pass import RankPass

Look = Callable[[Sequence[Cotangent]], None]


class AllOutputs:
    """The outputs of one batch, which goes through the ranks as a whole or in parts.

    Args:
        messages: the ranks.
        look: what is told the outputs' cotangents in a backward pass.
    """

    def __init__(self, messages: Messages, look: Look):
        self._messages, self._look = messages, look
        self._last, self._begun = messages.count - 1, False

    def hand_out(self, passes: Sequence[RankPass], out: Any) -> Any:
        """Send all ranks ``out``, which the last one's ``passes`` came to; return it."""
        states = [state for through in passes for state, _ in through.left()]
        if self._last == 0:
            return out
        skeleton, tensors = skeleton_of(out)
        metas = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        self._begun = True
        self._messages.share_note((skeleton, metas), self._last, _WHAT)
        for tensor in tensors:
            self._messages.share(tensor.detach().contiguous(), self._last, _WHAT)
        needing = [needed for *_, needed in metas]
        if not (torch.is_grad_enabled() and any(needing)):
            return out
        return _filled(skeleton, HandedOut.apply(self._look, needing, len(states), *states, *tensors))

    def receive(self, passes: Sequence[RankPass], device: torch.device) -> Any:
        """Return what the last rank hands out, where this one's ``passes`` have gone on to the next."""
        self._begun = True
        skeleton, metas = self._messages.share_note(None, self._last, _WHAT)
        found = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in metas]
        for tensor in found:
            self._messages.share(tensor, self._last, _WHAT)
        needing = [needed for *_, needed in metas]
        gone = [pair for through in passes for pair in through.left()]
        if torch.is_grad_enabled() and any(needing):
            found = Departed.apply(self._look, [take for _, take in gone], needing, *(t for t, _ in gone), *found)
        return _filled(skeleton, found)

    def give_up(self, halt: Halt) -> None:
        """Let all ranks know at once what has stopped this one, if they wait for the outputs."""
        with suppress(ChainError):
            if self._last > 0 and not self._begun:
                self._messages.share_note(halt, self._last, _WHAT)


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


_WHAT = "the model's outputs"


def _filled(skeleton: Any, found: Sequence[Tensor]) -> Any:
    """Return ``skeleton`` with the tensors whose numbers it holds."""
    return replaced(skeleton, {id(number): found[int(number)] for number in tensors_in(skeleton)})
