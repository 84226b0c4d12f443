"""What a piece of work allocates, as torch tells, on a CPU by its profiler."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope
from torch.autograd import profiler

from gradfree.devices.hardware import peak_bytes


def allocations(work: Callable[[], object]) -> list[int]:
    """Return the bytes of every allocation of ``work`` and, with a minus, of every release, in their order.

    What it returns is alive to the end: the sum is of what is kept.
    """
    gc.collect()  # Garbage freed meanwhile would count against what is measured.
    profile = profiler.profile(profile_memory=True)
    config, activities = profile.config(), profile.kineto_activities
    with _hushed():
        _prepare_profiler(config, activities)
        # Without torch's operations: to record each takes longer than many of them do.
        _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        try:
            kept = work()
        finally:
            found: list[Any] = _disable_profiler().events()
    del kept
    events = sorted((event for event in found if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events]


def peak_memory(work: Callable[[], object], device: torch.device | str) -> int:
    """Return how many bytes of tensors are alive at the worst moment of ``work``, above those before it.

    What the allocators hand out, so the same on every run; not what the process takes from the system.
    """
    gc.collect()  # Garbage freed meanwhile would count against what is measured.
    peak = peak_bytes(work, torch.device(device))
    return max(accumulate(allocations(work), initial=0)) if peak is None else peak


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep from the terminal what the profiler writes there, which nothing in Python can tell it not to."""
    terminal = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
