"""An architecture of another library, with its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH = 50, 12


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        name: the model's class, and its variant if there are several.
        library: the library.
        build: returns the model.
        loss: runs the model and returns the loss.
        quick: whether tests run it.
        chains: as in :meth:`gradfree.Engine.attach`.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    quick: bool = False
    chains: Sequence[str] | None = None

    def made(self) -> nn.Module:
        """Return the model in double precision and training mode, with the same weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().double().train()

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the gradients of one pass, with the same random numbers at each call."""
        model.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.loss(model).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens() -> Tensor:
    """Return token ids, (2, LENGTH)."""
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % WORDS


def images(size: int) -> Tensor:
    """Return two images, (2, 3, size, size)."""
    return torch.linspace(-50, 50, 6 * size * size, dtype=torch.float64).sin().reshape(2, 3, size, size)


def loss_of(out: Any) -> Tensor:
    """Return the output's own loss, or one of all floating point tensors in the output."""
    if getattr(out, "loss", None) is not None:
        return out.loss
    values = [out] if isinstance(out, Tensor) else list(out.values() if hasattr(out, "values") else out)
    tensors = [t for t in values if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t * torch.cos(t.detach())).mean() for t in tensors]).sum()
