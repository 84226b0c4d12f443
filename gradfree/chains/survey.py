"""Results of a dry run for a link: its residual path, and the path's share of the VJP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from gradfree.algebra.cotangents import Cotangent, Factor, times


@dataclass(frozen=True)
class LinkFindings:
    """Results of a dry run for one link, or for all steps of a layer.

    Attributes:
        path: of the block, or of the layer for a chain in time.
        residual: the mean of K, the diagonal of the residual path; ``None``: the engine does not need it, or the link's
            input gets no cotangent.
        share: ⟨δK, δF⟩ / ‖δF‖², the fraction of the exact VJP δF that the residual path explains; NaN without a VJP.
        batched: whether the block's VJP runs in a batch.
    """

    path: str
    residual: float | None = None
    share: float = nan
    batched: bool = False

    @classmethod
    def of_link(cls, path: str, factor: Factor, delta: Cotangent, pulled: Cotangent) -> LinkFindings:
        """Return the findings for a block whose exact VJP of ``delta`` is ``pulled``, and whose K is ``factor``."""
        if delta is None or pulled is None:
            return cls(path)
        if pulled.shape != delta.shape:
            return cls(path, 0.0)
        return cls(path, _wide(torch.as_tensor(factor)).mean().item(), share([times(delta, factor)], [pulled]))


def share(carried: Sequence[Cotangent], pulled: Sequence[Cotangent]) -> float:
    """Return ⟨carried, pulled⟩ / ‖pulled‖², with all parts concatenated."""
    product, _, of_all = products(carried, pulled).tolist()
    return product / of_all if of_all else nan


def products(found: Sequence[Cotangent], exact: Sequence[Cotangent]) -> Tensor:
    """Return ⟨found, exact⟩, ‖found‖² and ‖exact‖², with all parts concatenated, on their device.

    Parts without an exact gradient do not count.
    """
    total = torch.zeros(3)
    for g, e in zip(found, exact, strict=True):
        if e is not None:
            b = _wide(e).flatten()
            a = torch.zeros_like(b) if g is None else _wide(g).flatten().to(b)
            total = total.to(b) + torch.stack([a @ b, a @ a, b @ b])
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
