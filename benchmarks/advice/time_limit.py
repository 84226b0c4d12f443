"""A time limit for work in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class TimeIsOver(BaseException):
    """The time limit is reached; no ``Exception``, since the interrupted code could catch that."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block after ``seconds``, between two operations of Python.

    There is no limit outside of the main thread, and on systems without interval timers.

    Raises:
        TimeIsOver: the limit is reached.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise TimeIsOver

    before = signal.signal(signal.SIGALRM, interrupt)
    # Repeated, since Python drops exceptions in callbacks such as those of weak references.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
