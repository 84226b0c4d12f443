"""What a pass learns from besides the gradient of its loss: targets, or the loss as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfree.errors import NO_LESSON, ChainError
from gradfree.torchside.random_state import RandomState
from gradfree.torchside.restoring import restored_tensors

_GIVEN = {
    "targets": ("y", "the targets that the loss of this batch compares with"),
    "loss": ("f", "a function that runs the model on this batch and returns the loss"),
}


@dataclass(frozen=True)
class Lesson:
    """What an engine with :attr:`~gradfree.chains.chain.Solver.needs` learns from.

    Attributes:
        targets: of the batch, one row for each sample; ``None``: not given.
        loss: runs the model on the batch again and returns the loss that ``backward()`` is called on; ``None``: not
            given.
        buffers: the buffers of the model's modules, by module, which :meth:`evaluate` leaves as they are.
    """

    targets: Any = None
    loss: Callable[[], Tensor] | None = None
    buffers: Sequence[dict[str, Tensor | None]] = ()

    def check(self, needs: Sequence[str], engine: str) -> None:
        """Raise if something that ``engine`` needs, "targets" or "loss", is missing.

        Raises:
            ChainError: with the line that gives it.
        """
        for name in needs:
            if getattr(self, name) is None:
                given, meaning = _GIVEN[name]
                raise NO_LESSON.error(engine=engine, what=name, given=given, meaning=meaning)

    def evaluate(self, device: torch.device) -> Tensor:
        """Return the loss with the present weights, without a graph and always with the same random numbers.

        Random states and the model's buffers, such as batch statistics, are as before.

        Args:
            device: of the model, for its random state.

        Raises:
            ChainError: the loss is not a single number.
        """
        assert self.loss is not None  # :meth:`check` raises without one.
        with torch.no_grad(), RandomState(device).restored(), restored_tensors(self.buffers):
            loss = self.loss()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ChainError("the loss of a lesson must return one number: lesson(loss=lambda: loss_fn(model(x), y)).")
        return loss
