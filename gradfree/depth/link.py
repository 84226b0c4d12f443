"""One block's part of a forward pass, and walks through its graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from gradfree.algebra.cotangents import Cotangent
from gradfree.errors import ChainError


@dataclass(frozen=True)
class Link:
    """One block's part of a forward pass: a graph that ends at the block's own inputs.

    Attributes:
        path: the block's module path.
        block: the block.
        out: the block's output h_i, the root of the graph.
        state: where h_{i-1} enters the graph; ``None`` if it does not, or needs no gradient.
        inputs: where other tensors that need a gradient enter it, by their number in the chain.
        parameters: the trainable parameters that the graph leads to, by their number in the chain.
        root: the node that computed ``out`` in the pass; ``None`` where its graph is not kept.
        writes: whether a walk through the graph may change the cotangent that it starts from, in place.
        aside: what the block has returned besides, as far as it has a gradient; roots of the same graph.
        entries: where anything enters the graph of ``out`` or ``aside``: inputs by number, the state as ``None``.
        in_place: whether the block has changed the state that it was given.
        aliased: whether the output shares memory with another tensor that the block returned.
    """

    path: str
    block: nn.Module
    out: Tensor
    state: GradientEdge | None
    inputs: tuple[tuple[int, GradientEdge], ...]
    parameters: dict[int, Tensor]
    root: Node | None
    writes: bool
    aside: tuple[Tensor, ...] = ()
    entries: tuple[tuple[int | None, GradientEdge], ...] = ()
    in_place: bool = False
    aliased: bool = False

    def given(self, delta: Tensor) -> Tensor:
        """Return ``delta`` for the graph to start from, a copy if it must not be changed."""
        return delta.clone() if self.writes else delta


class Pathed(Protocol):
    """Whatever has the path of a block."""

    @property
    def path(self) -> str:
        """The block's module path."""


@contextmanager
def walking(links: Sequence[Pathed], delta: Sequence[Cotangent]) -> Iterator[None]:
    """Say which links a failing local backward pass belongs to; refuse one that has changed its cotangents."""
    where = links[0].path if len(links) == 1 else f"{links[-1].path} to {links[0].path}"
    versions = [None if d is None else d._version for d in delta]
    try:
        yield
        if any(d is not None and d._version != version for d, version in zip(delta, versions, strict=True)):
            raise ChainError(
                f"a hook on a tensor inside {where} changes its gradient in place, which others read too. Return a new "
                "one: lambda g: g.clamp(-1, 1), not g.clamp_(-1, 1)."
            )
    except (torch.OutOfMemoryError, ChainError):
        raise
    except RuntimeError as error:
        reason = _FREED if "backward through the graph a second time" in str(error) else str(error)
        raise ChainError(f"the backward pass inside {where} failed: {reason}") from error


_FREED = (
    "its graph is freed already. A loss on a tensor that a block or a hook has kept from inside has run it, or an "
    "earlier backward pass: call backward(retain_graph=True), or return that tensor from the block beside the state."
)
