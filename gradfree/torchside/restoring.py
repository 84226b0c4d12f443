"""Restores the tensors of modules after a pass that does not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parameter import is_lazy


@contextmanager
def restored_tensors(owned: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Restore tensors after the ``with``, also after an error: their values, and which tensors they are.

    Args:
        owned: the ``_buffers`` or ``_parameters`` of modules.
    """
    kept = [(own, dict(own)) for own in owned]
    tensors = {id(t): t for _, entries in kept for t in entries.values() if t is not None and not is_lazy(t)}
    values = [(t, t.detach().clone()) for t in tensors.values()]
    try:
        yield
    finally:
        for own, entries in kept:
            own.clear()
            own.update(entries)
        for t, value in values:
            # Not a change that autograd sees: it would count against a graph that waits for its backward.
            t.data.copy_(value)
