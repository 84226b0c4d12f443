"""Batches of vector-Jacobian products by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def batched_vjps(
    outputs: Sequence[Tensor], targets: Sequence[Any], cotangents: Sequence[Tensor], one_by_one: bool = False
) -> list[Tensor | None]:
    """Return the VJPs of N sets of cotangents: for each target a batch of N gradients, or ``None`` if it gets none.

    Args:
        outputs: roots of graphs, which are kept.
        targets: tensors or edges of the graphs.
        cotangents: of each output, (N, ...).
        one_by_one: whether to run N backward passes on copies of the cotangents, for graphs that may write to these.
            Graphs that cannot run as one batch always run so.
    """
    vjps = partial(torch.autograd.grad, outputs, targets, retain_graph=True, allow_unused=True)
    # Anomaly mode looks for NaN, by a branch on values.
    if not (one_by_one or torch.is_anomaly_enabled()):
        try:
            return list(vjps(cotangents, is_grads_batched=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # An operation that torch cannot batch: .item() or a branch on values. Other errors are raised again below.
            pass
    rows = [vjps([c[n].clone() for c in cotangents]) for n in range(len(cotangents[0]))]
    return [None if of_target[0] is None else torch.stack(of_target) for of_target in zip(*rows, strict=True)]
