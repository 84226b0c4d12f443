"""Times candidates that take turns in the first steps of a training."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import torch

from gradfree.devices.hardware import mark, seconds

_WARM_UP, _TIMED = 1, 2
"""Steps of a turn."""
ROUNDS = 4
_HOPELESS = 2.0
"""After the first round, a candidate that takes this many times longer than the best has no more turns."""


class Turns:
    """The first steps of a training, in which candidates take turns.

    The number of steps is fixed, so that all ranks end the turns at the same step. On a CPU, a candidate that is much
    slower than the best one gives its later turns to the best. Other devices would have to wait for the times.

    Args:
        count: the number of candidates.
        rounds: the number of turns of each candidate.
    """

    def __init__(self, count: int, rounds: int = ROUNDS):
        turn = _WARM_UP + _TIMED
        self._order = list(chain.from_iterable(repeat(index, turn) for _ in range(rounds) for index in range(count)))
        self._turn, self._round = turn, turn * count
        self._n = 0
        self._start: Any = None
        self._times: list[list[tuple[Any, Any]]] = [[] for _ in range(count)]

    @property
    def current(self) -> int | None:
        """The index of the candidate for this step; ``None`` after the last turn."""
        return self._order[self._n] if self._n < len(self._order) else None

    def begin(self, device: torch.device) -> None:
        """Mark the beginning of a step."""
        self._start = mark(device)

    def end(self, device: torch.device) -> None:
        """Mark the end of a step; its time does not count without a beginning, nor in the first step of a turn."""
        end = mark(device)
        if self._start is not None and self._n % self._turn >= _WARM_UP:
            self._times[self._order[self._n]].append((self._start, end))
        self._n, self._start = self._n + 1, None
        if self._n == self._round and device.type == "cpu":
            self._drop_slowest()

    def times(self) -> list[float]:
        """Return the lower quartile of each candidate's step times in seconds; waits for the device.

        The lower quartile, since other work on the machine only makes steps longer.
        """
        return [sorted(seconds(*pair) for pair in pairs)[len(pairs) // 4] for pairs in self._times]

    def _drop_slowest(self) -> None:
        times = self.times()
        best = min(range(len(times)), key=times.__getitem__)
        self._order = [best if times[index] > _HOPELESS * times[best] else index for index in self._order]
