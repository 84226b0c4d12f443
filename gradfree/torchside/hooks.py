"""Keeping tensor hooks from running where autograd would not run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Keep tensor hooks on parameters from running here: autograd runs them when the gradient arrives."""
    hooked = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)


def spare_hooks(tensors: Iterable[Tensor]) -> None:
    """Until the running backward pass ends, keep hooks on ``tensors`` from being called with no gradient.

    Autograd calls a hook with ``None`` where a function returns that; a tensor that it does not reach has no call.
    """
    hooked = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]

    def restore() -> None:
        for hooks, saved in hooked:
            hooks.update({key: hook for key, hook in saved.items() if key in hooks})

    for hooks, saved in hooked:
        hooks.update({key: partial(_unless_none, hook) for key, hook in saved.items()})
    if hooked:
        torch.autograd.Variable._execution_engine.queue_callback(restore)


def _unless_none(hook: Callable[[Tensor], Tensor | None], grad: Tensor | None) -> Tensor | None:
    return None if grad is None else hook(grad)
