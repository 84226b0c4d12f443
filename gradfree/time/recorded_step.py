"""One step of a cell under an engine: runs it, and refuses what it does to its arguments besides computing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from gradfree.errors import CHANGED_STATE, HOOK_WITHOUT_GRAPH, HOOKED_STATE
from gradfree.torchside.hooks import has_hooks
from gradfree.torchside.private import version


def recorded_step(
    step: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]], where: str, x: Tensor, parts: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return ``step(x, parts)``, of one step or of all as a batch.

    Args:
        step: runs the cell.
        where: the cell's path.
        x: its input.
        parts: the parts of its state.

    Raises:
        ChainError: the cell has changed an argument in place, or put a gradient hook on it.
    """
    given = (x, *parts)
    before = [version(t) for t in given]
    with cell_errors(where):
        after = step(x, parts)
    if [version(t) for t in given] != before:
        raise CHANGED_STATE.error(path=where)
    if any(map(has_hooks, given)):
        raise HOOKED_STATE.error(path=where)
    return after


@contextmanager
def cell_errors(where: str) -> Iterator[None]:
    """Turn torch's errors about tensors that need a gradient here, or need none here, into refusals."""
    try:
        yield
    except RuntimeError as error:
        if "register a hook on" in str(error) or "can't retain_grad on" in str(error):
            raise HOOK_WITHOUT_GRAPH.error(path=where) from error
        if "leaf Variable that requires grad" in str(error):
            raise CHANGED_STATE.error(path=where) from error
        raise
