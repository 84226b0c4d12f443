"""Time between two points of a program, on the CPU or in a GPU's queue, without waiting for it in between."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Return a point in time: of the CPU or, for a GPU, of what has been queued on its current stream."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Any, end: Any) -> float:
    """Return the time between two marks; waits until a GPU has reached the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
