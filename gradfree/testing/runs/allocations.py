"""What a piece of work allocates on the CPU, as torch's profiler records it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler


def allocations(work: Callable[[], object]) -> list[int]:
    """Return the bytes of every allocation of ``work`` and, with a minus, of every release, in their order."""
    gc.collect()  # Garbage freed meanwhile would count against what is measured.
    with profiler.profile(profile_memory=True) as recorded:
        work()
    found: Any = recorded.kineto_results.events()
    events = sorted((event for event in found if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return [event.nbytes() for event in events]
