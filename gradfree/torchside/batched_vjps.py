"""Vector-Jacobian products of autograd, many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def batched_vjps(
    outputs: Sequence[Tensor], targets: Sequence[Any], cotangents: Sequence[Tensor], one_by_one: bool = False
) -> list[Tensor | None]:
    """Return what N sets of cotangents bring to ``targets``, one batch of N for each of them; ``None`` if nothing.

    Args:
        outputs: roots of graphs, which are kept.
        targets: tensors or edges of the graphs.
        cotangents: of each output, (N, ...).
        one_by_one: whether to walk through the graphs N times, and give them copies: for graphs that may write to their
            cotangents. What cannot run as one batch does so anyway.
    """
    if not one_by_one:
        try:
            return list(_grad(outputs, targets, cotangents, is_grads_batched=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # An operation that torch cannot batch, .item() or a branch on values; any other error comes again below.
            pass
    rows = [_grad(outputs, targets, [c[n].clone() for c in cotangents]) for n in range(len(cotangents[0]))]
    return [None if of_target[0] is None else torch.stack(of_target) for of_target in zip(*rows, strict=True)]


def _grad(outputs: Any, targets: Any, cotangents: Any, is_grads_batched: bool = False) -> tuple[Any, ...]:
    return torch.autograd.grad(
        outputs, targets, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=is_grads_batched
    )
