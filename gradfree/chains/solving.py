"""Handing a chain over to its engine or, for comparison, to backpropagation; asking how the engine solves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from gradfree.chains.chain import Chain, ChainGradients, Solver

Figures = dict[str, dict[str, Tensor]]

# Not context variables: autograd solves chains on a GPU in threads of its own.
_exactly = False
_figures: Figures | None = None


def solve(engine: Solver, chain: Chain, direct: Any, path: str) -> ChainGradients:
    """Return the gradients of ``chain``: the engine's, or inside :func:`exactly` backpropagation's.

    Args:
        engine: the engine.
        chain: the chain.
        direct: the direct cotangents of its states.
        path: what the chain is called in :func:`engine_figures`.
    """
    if _exactly:
        return chain.backpropagate(direct)
    chain.path = path
    if _figures is not None:
        chain.figures = _figures.setdefault(path, {})
    return engine.gradients(chain, direct)


@contextmanager
def exactly() -> Iterator[None]:
    """Let backpropagation solve every chain in the backward passes inside the block, whatever engine is attached."""
    global _exactly
    before, _exactly = _exactly, True
    try:
        yield
    finally:
        _exactly = before


@contextmanager
def engine_figures() -> Iterator[Figures]:
    """Ask engines how they solve their chains in the backward passes inside the block.

    Costs one more sweep a chain; the gradients are bit for bit the same as without. What there is depends on the
    engine: "sweeps", their number; "residual", the norm of what one more sweep would change in the cotangents of all
    states, relative to theirs; "drift", the largest ‖W Wᵀ - I‖ of the weights that are kept orthogonal.

    Yields:
        The figures of each chain's last pass, single numbers on their devices: filled by the backward passes, by module
        path of the chain and name of the figure. A recurrent module has a chain for each layer and direction, named
        like its weights: "rnn.l0", "rnn.l0_reverse".
    """
    global _figures
    before, _figures = _figures, {}
    try:
        yield _figures
    finally:
        _figures = before
