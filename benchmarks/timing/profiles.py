"""What torch's profiler tells: peak memory, and how long the ranges took that gradfree and benchmarks mark."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType, _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope
from torch.autograd import profiler


class Range(NamedTuple):
    """One run of a marked piece of code.

    Attributes:
        name: its mark.
        start: in nanoseconds since some moment.
        end: likewise.
        on_host: whether it is the time that Python took, and not the time that a GPU took for what was launched in it.
    """

    name: str
    start: int
    end: int
    on_host: bool


@contextmanager
def recorded(device: str) -> Iterator[list[Range]]:
    """Record the ranges inside the block, and nothing else.

    torch.profiler also records torch's own operations, which takes longer than many of them do: in a loop over a GRU's
    steps the profiler is what is measured.

    Args:
        device: where the time is to be measured, "cpu" or "cuda".

    Yields:
        A list that is filled when the block ends, in the order of the ranges' starts.
    """
    found = list[Range]()
    with _profiled(profiler.profile(use_device=None if device == "cpu" else device)) as events:
        yield found
    found += sorted(
        (
            Range(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.device_type() == DeviceType.CPU)
            for e in events
        ),
        key=lambda r: r.start,
    )


def seconds_inside(outer: Range, ranges: Sequence[Range], prefix: str) -> defaultdict[str, float]:
    """Return the seconds of the ranges that begin in ``outer`` and whose names begin with ``prefix``, by the rest.

    Args:
        outer: a range.
        ranges: all on the host, or all on the GPU, in the order of their starts. One inside another of its name is
            part of that.
        prefix: of the names.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    ends: defaultdict[str, int] = defaultdict(int)
    for name, start, end, _ in ranges:
        if name.startswith(prefix) and outer.start <= start < outer.end and start >= ends[name]:
            seconds[name.removeprefix(prefix)] += 1e-9 * (end - start)
            ends[name] = end
    return seconds


def peak_memory(work: Callable[[], object], device: torch.device | str) -> int:
    """Return how many bytes of tensors are alive at the worst moment of ``work``, above those before it.

    What the allocators hand out, so the same on every run; not what the process takes from the system.
    """
    gc.collect()  # Garbage freed meanwhile would count against what is measured.
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    # torch counts no peak on a CPU, but its profiler records every allocation and release.
    with _allocations() as changes:
        work()
    return max(accumulate(changes, initial=0))


def kept_memory(work: Callable[[], object]) -> int:
    """Return how many bytes of tensors on the CPU are alive because of what ``work`` returns."""
    gc.collect()
    with _allocations() as changes:
        kept = work()
    del kept
    return sum(changes)


@contextmanager
def _allocations() -> Iterator[list[int]]:
    """Yield a list for the bytes of every allocation and, with a minus, every release in the block, in their order."""
    changes = list[int]()
    with _profiled(profiler.profile(profile_memory=True)) as events:
        yield changes
    memory = (event for event in events if event.name() == "[memory]")
    changes += [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]


@contextmanager
def _profiled(profile: Any) -> Iterator[list[Any]]:
    """Yield a list for what is recorded in the block: marked ranges, of which memory is one kind, and no operations."""
    events = list[Any]()
    config, activities = profile.config(), profile.kineto_activities
    with _hushed():
        _prepare_profiler(config, activities)
        _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        try:
            yield events
        finally:
            events += _disable_profiler().events()


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
