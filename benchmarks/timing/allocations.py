"""Memory that a function allocates, on a CPU from torch's profiler, and that a process takes from the system."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope
from torch.autograd import profiler

from gradfree.devices.hardware import peak_bytes

_MARK = 12_345
"""Bytes that are allocated first: without them, the profiler has lost events."""


def allocations(work: Callable[[], object]) -> list[int]:
    """Return the bytes of every allocation of ``work`` and, negated, of every release, in order.

    The result of ``work`` is kept alive, so the sum is the memory that ``work`` leaves allocated. Runs it again if the
    profiler has lost its events, which is rare.

    Raises:
        RuntimeError: it has lost them three times.
    """
    for _ in range(3):
        found = _profiled(work)
        if found[:2] == [_MARK, -_MARK]:
            return found[2:]
    raise RuntimeError("torch's profiler has recorded no memory: measure again.")


def _profiled(work: Callable[[], object]) -> list[int]:
    """Return what :func:`allocations` does, behind an allocation of :data:`_MARK` bytes and its release."""
    gc.collect()  # Garbage freed during the measurement would count as a release.
    profile = profiler.profile(profile_memory=True)
    config, activities = profile.config(), profile.kineto_activities
    with _silenced_stderr():
        _prepare_profiler(config, activities)
        # Operations are not recorded: recording one takes longer than many of them run.
        _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        try:
            torch.empty(_MARK, dtype=torch.uint8, device="cpu")
            kept = work()
        finally:
            found: list[Any] = _disable_profiler().events()
    del kept
    events = sorted((event for event in found if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events]


def peak_memory(work: Callable[[], object], device: torch.device | str) -> int:
    """Return the peak number of bytes in tensors during ``work``, above those allocated before.

    Counts what torch's allocators return, so every run gives the same; not what the process takes from the system.
    """
    gc.collect()
    peak = peak_bytes(work, torch.device(device))
    return max(accumulate(allocations(work), initial=0)) if peak is None else peak


def process_peak() -> int | None:
    """Return the most bytes of memory that this process has held so far; ``None`` where the system does not tell.

    Not ``ru_maxrss``, which a process inherits from the one that starts it.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(found[1]) * 1024 if found else None


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Redirect file descriptor 2 to nowhere: the profiler writes to it, and Python has no option against that."""
    terminal = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
