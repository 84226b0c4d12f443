"""Handing a chain over to its engine or, for comparison, to backpropagation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gradfree.chain import Chain, ChainGradients

if TYPE_CHECKING:
    from gradfree.engine import Engine

# Not a context variable: autograd solves chains on a GPU in threads of its own.
_exactly = False


def solve(engine: Engine, chain: Chain, direct: Any) -> ChainGradients:
    """Return the gradients of ``chain``: the engine's, or inside :func:`exactly` backpropagation's."""
    return chain.backpropagate(direct) if _exactly else engine.gradients(chain, direct)


@contextmanager
def exactly() -> Iterator[None]:
    """Let backpropagation solve every chain in the backward passes inside the block, whatever engine is attached."""
    global _exactly
    before, _exactly = _exactly, True
    try:
        yield
    finally:
        _exactly = before
