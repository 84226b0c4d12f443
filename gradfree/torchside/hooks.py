"""Hooks: keeping tensors' from running where autograd would not run them, and noticing a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from gradfree.torchside.private import after_backward, hooks_of


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Keep tensor hooks on parameters from running here: autograd runs them when the gradient arrives."""
    hooked = [(hooks, dict(hooks)) for leaf in leaves if (hooks := hooks_of(leaf))]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)


def spare_hooks(hooks: Iterable[dict[int, Any] | None]) -> None:
    """Until the running backward pass ends, keep tensors' ``hooks`` from being called with no gradient.

    Autograd calls a hook with ``None`` where a function returns that; a tensor that it does not reach has no call.
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
    """Make each of ``calls`` once, when a backward pass comes to what has made one of ``outputs``."""
    waiting = list(calls)

    def call(*_: Any) -> None:
        while waiting:
            waiting.pop()()

    for node in {out.grad_fn for out in outputs}:
        if node is not None:
            node.register_hook(call)
