"""What torch's profiler tells: peak memory, and how long the ranges took that gradfree and benchmarks mark."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler

from gradfree.testing.runs.allocations import allocations, profiled


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
    with profiled(profiler.profile(use_device=None if device == "cpu" else device)) as events:
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
    if torch.device(device).type != "cuda":
        # torch counts no peak on a CPU.
        return max(accumulate(allocations(work), initial=0))
    gc.collect()  # Garbage freed meanwhile would count against what is measured.
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
