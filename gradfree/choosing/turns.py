"""Times candidates that take turns in the first steps of a training."""

from __future__ import annotations

from typing import Any

import torch

from gradfree.devices.hardware import mark, seconds

_WARM_UP, _TIMED = 1, 8
"""Steps of a turn."""


class Turns:
    """The first steps of a training, in which each candidate has one turn.

    Args:
        count: the number of candidates.
    """

    def __init__(self, count: int):
        self._n = 0
        self._start: Any = None
        self._times: list[list[tuple[Any, Any]]] = [[] for _ in range(count)]

    @property
    def current(self) -> int | None:
        """The index of the candidate for this step; ``None`` after the last turn."""
        index = self._n // (_WARM_UP + _TIMED)
        return index if index < len(self._times) else None

    def begin(self, device: torch.device) -> None:
        """Mark the beginning of a step."""
        self._start = mark(device)

    def end(self, device: torch.device) -> None:
        """Mark the end of a step; its time does not count without a beginning, nor in the first step of a turn."""
        end, index = mark(device), self.current
        assert index is not None
        if self._start is not None and self._n % (_WARM_UP + _TIMED) >= _WARM_UP:
            self._times[index].append((self._start, end))
        self._n, self._start = self._n + 1, None

    def times(self) -> list[float]:
        """Return the lower quartile of each candidate's step times in seconds; waits for the device.

        The lower quartile, since other work on the machine only makes steps longer.
        """
        return [sorted(seconds(*pair) for pair in pairs)[len(pairs) // 4] for pairs in self._times]
