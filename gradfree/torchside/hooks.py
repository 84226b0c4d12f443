"""Tensor hooks: suppresses them where autograd would not call them, and runs callbacks in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from gradfree.torchside.private import after_backward, hooks_of


def has_hooks(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has a gradient hook or ``retain_grad()``."""
    return bool(hooks_of(tensor)) or tensor.retains_grad


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Suppress tensor hooks of ``leaves`` inside the ``with``; autograd calls them later, with the whole gradient."""
    hooked = [(hooks, dict(hooks)) for leaf in leaves if (hooks := hooks_of(leaf))]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)


def spare_hooks(hooks: Iterable[dict[int, Any] | None]) -> None:
    """Until the running backward pass ends, suppress calls of tensor ``hooks`` with ``None``.

    Autograd calls a hook with ``None`` if an autograd function returns that. For a tensor that it does not reach, it
    would not call the hook at all.
    """
    hooked = [(own, dict(own)) for own in hooks if own]

    def restore() -> None:
        for own, saved in hooked:
            own.update({key: hook for key, hook in saved.items() if key in own})

    for own, saved in hooked:
        own.update({key: partial(_unless_none, hook) for key, hook in saved.items()})
    if hooked:
        after_backward(restore)


def _unless_none(hook: Callable[[Tensor], Tensor | None], grad: Tensor | None) -> Tensor | None:
    return None if grad is None else hook(grad)


def when_backward(outputs: Iterable[Tensor], calls: Iterable[Callable[[], None]]) -> None:
    """Call each of ``calls`` once, when a backward pass reaches the node of one of ``outputs``."""
    waiting = list(calls)
    if not waiting:
        return

    def call(*_: Any) -> None:
        while waiting:
            waiting.pop()()

    for node in {out.grad_fn for out in outputs}:
        if node is not None:
            node.register_hook(call)
