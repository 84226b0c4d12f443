"""Peak memory of a piece of work."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.autograd.profiler import profile


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
    with profile(profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))
