"""Which of several candidates is the fastest: they take turns over the first steps of a training."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import torch

from gradfree.devices.hardware import mark, seconds

_WARM_UP, _TIMED = 1, 2
"""Steps of a turn."""
ROUNDS = 4
_HOPELESS = 2.0
"""Times what the best takes, behind the first round."""


class Turns:
    """Some steps of a training in which candidates take turns.

    Their number is settled from the start, so that ranks that train together end it at the same step. A way that is
    hopelessly slow has one turn, and the best until then its others; on the CPU alone, as elsewhere to look is to wait.

    Args:
        count: of the candidates.
        rounds: turns of each.
    """

    def __init__(self, count: int, rounds: int = ROUNDS):
        turn = _WARM_UP + _TIMED
        self._candidates = list(chain.from_iterable(repeat(way, turn) for _ in range(rounds) for way in range(count)))
        self._turn, self._round = turn, turn * count
        self._n = 0
        self._start: Any = None
        self._times: list[list[tuple[Any, Any]]] = [[] for _ in range(count)]

    @property
    def way(self) -> int | None:
        """Whose step it is; ``None``: the last one is over."""
        return self._candidates[self._n] if self._n < len(self._candidates) else None

    def begin(self, device: torch.device) -> None:
        """Say that a step begins."""
        self._start = mark(device)

    def end(self, device: torch.device) -> None:
        """Say that the step has ended; one without a beginning does not count, nor does a turn's first."""
        end = mark(device)
        if self._start is not None and self._n % self._turn >= _WARM_UP:
            self._times[self._candidates[self._n]].append((self._start, end))
        self._n, self._start = self._n + 1, None
        if self._n == self._round and device.type == "cpu":
            self._drop_slowest()

    def times(self) -> list[float]:
        """Return the seconds of a step of each way, the lower quartile; waits for a GPU to have taken the last.

        Whatever else a machine does makes steps longer, never shorter.
        """
        return [sorted(seconds(*pair) for pair in pairs)[len(pairs) // 4] for pairs in self._times]

    def _drop_slowest(self) -> None:
        times = self.times()
        best = min(range(len(times)), key=times.__getitem__)
        self._candidates = [best if times[way] > _HOPELESS * times[best] else way for way in self._candidates]
