"""Symbolic traces in one thread, while others may run modules."""

from __future__ import annotations

from threading import Lock, get_ident
from typing import Any

from torch import fx, nn

_tracing = Lock()
"""Held while torch traces, because it patches the call of all modules: two traces would mix up their patches."""


class ThreadTracer(fx.Tracer):
    """Traces calls of the thread that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = get_ident()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace ``root``, after traces of other threads."""
        with _tracing:
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run calls of other threads normally."""
        if get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)
