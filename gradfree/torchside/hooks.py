"""Tensor hooks: suppresses them where autograd would not call them, and runs callbacks in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gradfree.torchside.private import after_backward, backward_id, hooks_of, late_hooks_of, version


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


def spare_hooks(tensors: Iterable[Tensor]) -> None:
    """Until the running backward pass ends, suppress calls of the hooks of ``tensors`` that get no gradient.

    Autograd calls a tensor hook with ``None``, and hooks that follow the accumulation of a gradient, if an autograd
    function returns ``None``. For a tensor that it does not reach, it would call neither.
    """
    hooked: list[tuple[dict[int, Any], dict[int, Any]]] = []
    this = backward_id()

    def wrap(own: dict[int, Any] | None, spared: Callable[[Any], _Spared]) -> None:
        fresh = {}
        for key, hook in (own or {}).items():
            if isinstance(hook, _Spared):
                if hook.backward == this:
                    continue  # Another chain has wrapped it.
                hook = hook.hook  # Of a pass that raised: torch has not called `restore`.
            fresh[key] = hook
        if own and fresh:
            hooked.append((own, fresh))
            own.update({key: spared(hook) for key, hook in fresh.items()})

    def restore() -> None:
        for own, saved in hooked:
            own.update({key: hook for key, hook in saved.items() if key in own})

    for tensor in tensors:
        wrap(hooks_of(tensor), partial(_UnlessNone, this))
        if late := late_hooks_of(tensor):
            wrap(late, partial(_IfAccumulated, this, before=_state_of_gradient(tensor)))
    if hooked:
        after_backward(restore)


@dataclass(eq=False)
class _Spared:
    """A hook during the backward pass of this id."""

    backward: int
    hook: Callable[[Tensor], Tensor | None]


class _UnlessNone(_Spared):
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


@dataclass(eq=False)
class _IfAccumulated(_Spared):
    before: object

    def __call__(self, tensor: Tensor) -> None:
        if _state_of_gradient(tensor) != self.before:
            self.hook(tensor)


def _state_of_gradient(tensor: Tensor) -> object:
    return None if tensor.grad is None else (id(tensor.grad), version(tensor.grad))


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
