"""Results of a dry run for a chain: its pieces, its residual paths, and their share of the VJP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan

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


@dataclass(frozen=True)
class ChainFindings:
    """Results of a dry run for one chain.

    Attributes:
        pieces: the links that the engine solves together, piece by piece in the order of the forward pass.
        splits: why a block began a new piece, by the block's path.
        left: the blocks that autograd differentiated, or that the loss does not depend on.
    """

    pieces: Sequence[Sequence[LinkFindings]] = ()
    splits: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        if len(self.pieces) > 1:
            yield f"{len(self.pieces)} pieces: {', '.join(_span(piece) for piece in self.pieces)}"
        for reason, paths in _by_value(self.splits).items():
            yield f"split at {_listed(paths)}: {reason}"
        if rest := [path for path in self.left if path not in self.splits]:
            yield f"not run by the engine: {_listed(rest)}"
        for piece in self.pieces:
            residual = _range(link.residual for link in piece if link.residual is not None)
            explained = _range(link.share for link in piece if not isnan(link.share))
            if residual:
                batches = ", in batches" if piece[0].batched else ""
                yield f"{_span(piece)}: residual path {residual}, its share {explained or 'unknown'}{batches}"


def share(carried: Sequence[Cotangent], pulled: Sequence[Cotangent]) -> float:
    """Return ⟨carried, pulled⟩ / ‖pulled‖², with all parts concatenated."""
    pairs = [(c, p) for c, p in zip(carried, pulled, strict=True) if p is not None]
    of_all = sum(float(_wide(p).pow(2).sum()) for _, p in pairs)
    of_known = sum(float((_wide(c) * _wide(p)).sum()) for c, p in pairs if c is not None)
    return of_known / of_all if of_all else nan


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _range(values: Iterable[float]) -> str:
    """Return the smallest and the largest value in words; "" without values."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (*found[:1], *found[-1:])))


def _span(links: Sequence[LinkFindings]) -> str:
    first, last = links[0].path, links[-1].path
    return first if len(links) == 1 else f"{first} to {last}"


def _listed(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _by_value(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, reason in reasons.items():
        found.setdefault(reason, []).append(path)
    return found
