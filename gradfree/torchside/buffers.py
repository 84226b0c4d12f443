"""Restores the buffers of modules after a pass that does not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def restored_buffers(buffers: Iterable[dict[str, Tensor | None]]) -> Iterator[None]:
    """Restore buffers after the ``with``, also after an error: their values, and which tensors they are.

    Args:
        buffers: the ``_buffers`` of modules.
    """
    kept = [(own, dict(own)) for own in buffers]
    tensors = [buffer for _, entries in kept for buffer in entries.values() if buffer is not None]
    values = [(buffer, buffer.detach().clone()) for buffer in tensors]
    try:
        yield
    finally:
        for own, entries in kept:
            own.clear()
            own.update(entries)
        for buffer, value in values:
            # Not a change that autograd sees: it would count against a graph that waits for its backward.
            buffer.data.copy_(value)
