"""What calls of one step function have learnt: which number of segments is the fastest, and what cannot be cut."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradfree.convergence.outcome import Outcome
from gradfree.devices.costs import best_count
from gradfree.devices.hardware import mark, seconds
from gradfree.loops.compiled import CHUNK, Compiler
from gradfree.segments.rule import ChainPass, SegmentRule
from gradfree.torchside.hooks import when_backward
from gradfree.torchside.private import saves_elsewhere

_TURN = 3
"""How many calls a way is timed for."""
_HOPELESS = 3.0
"""If the first call of a turn takes this many times as long as another way, the turn ends."""
_FIRST_WAIT, _LONGEST_WAIT = 256, 8192
"""After how many calls the fastest numbers are timed again, at first and at most."""
_LONGER = 1.25
"""With a burn-in that is longer by this factor than those at the last choice, the fastest numbers are timed again."""
_GAIN = 0.97
"""A cut that takes more of the plain loop's time than this is not taken."""


@dataclass
class ScanPass(ChainPass):
    """One pass through a loop. Its burn-in may be longer than a segment: then segments run more than once for it."""

    burnt: int = field(default=0, init=False)
    """The number of burn-in steps that this pass began with."""
    _trains: bool = field(default_factory=torch.is_grad_enabled, init=False)

    def burn_in(self, rule: SegmentRule) -> int:
        """Return the number of burn-in steps."""
        return rule.burn if isinstance(rule.burn, int) else self.burn

    @property
    def _pause_key(self) -> str:
        # Evaluation may be cut where training cannot: a cell draws in training only.
        return super()._pause_key if self._trains else f"{super()._pause_key} without gradients"

    def learn(self, outcome: Outcome) -> None:
        """Keep the number of burn-in steps after which the start contributes a quarter of the tolerance."""
        assert self.plan is not None
        first, *more = outcome.mismatches
        tolerance = self.plan.stopping.tolerance
        if not 0.0 < first < 1.0:
            return
        enough = log(tolerance / 4)
        # As if the error had been one at the start.
        needed = self.burnt * enough / log(first)
        fallen = [n for n, mismatch in enumerate(more, 1) if 0.0 < mismatch < first]
        if fallen:
            # A sweep is a burn-in that is longer by a segment.
            steps = fallen[-1] * -(-self.length // self.plan.count)
            last = more[fallen[-1] - 1]
            by_sweeps = self.burnt + steps * (enough - log(first)) / (log(last) - log(first))
            # Rounding may be most of what is left.
            needed = min(needed, by_sweeps) if needed and log(last) < enough else by_sweeps
        if first > tolerance or needed < 0.9 * self.burnt:
            burn = max(8, min(8 * -(-int(needed) // 8), self.length // 2))
            self.memory[self._burn_key] = torch.tensor(burn, device="cpu")


class NewtonPass(ScanPass):
    """One pass through a loop by Newton's method."""

    failure = "does not converge by Newton's method"

    @property
    def key(self) -> str:
        """The name of this pass in the memory that it shares with passes in segments."""
        return f"newton {super().key}"

    def learn(self, outcome: Outcome) -> None:
        """Learn nothing: there is no burn-in."""


@dataclass
class Knowledge:
    """What calls of one step function have learnt; it changes how they run, never their results.

    Args:
        memory: tensors of the passes, see :class:`~gradfree.convergence.passes.Pass`; ``None``: separate ones for
            each number of units, since programs make closures anew in every pass.
        compiler: compiles chunks of steps; ``None``: nothing is compiled.
    """

    _memory: dict[str, Tensor] | None = None
    _compiler: Compiler | None = None
    _memories: dict[Hashable, dict[str, Tensor]] = field(default_factory=dict)
    _contests: dict[Hashable, Contest] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)
    _has_changed: bool = False

    def warn(self, message: str) -> None:
        """Issue a warning, once."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    def excuse_change(self) -> bool:
        """Return whether a call may change something outside of its step: once, as it may fill a cache."""
        was, self._has_changed = self._has_changed, True
        return not was

    def memory(self, like: Tensor) -> dict[str, Tensor]:
        """Return the memory of the passes through states such as ``like`` (rows, units)."""
        return self._memories.setdefault(like.shape[1], {}) if self._memory is None else self._memory

    def stopwatch(self, passes: Sequence[ScanPass], cuts: bool, newton: bool, fixed: Way | None) -> Stopwatch:
        """Return how this call runs, and what times it.

        Args:
            passes: both passes in segments; their sizes are those of the call.
            cuts: whether it may run in segments.
            newton: whether it may run by Newton's method.
            fixed: how the user asks it to run; ``None``: as is fastest.
        """
        this = passes[0]
        like, length, compiles = this.like, this.length, self._compiler is not None
        if fixed is not None or not (cuts or newton):
            way = PLAIN if fixed is None else fixed
            return Stopwatch(way._replace(is_compiled=compiles), None, like.device)
        key = (length, like.shape, like.dtype, like.device, torch.is_grad_enabled(), cuts, newton)
        if key not in self._contests:
            count = min(max(2, length // this.burn), best_count(length, len(like), this.free, this.burn))
            candidates = [*[by_newton(length)] * newton, *[Way(count)] * cuts]
            self._contests[key] = Contest(candidates, length if compiles else None)
        contest = self._contests[key]
        burn = max(each.burn for each in passes)
        # Not in a checkpoint, whose second run must be as the first one.
        way, is_timed = (contest.fastest, False) if saves_elsewhere() else contest.next(length // 8, burn)
        return Stopwatch(way, contest if is_timed else None, like.device)

    def compiler(self, way: Way) -> Compiler | None:
        """Return what compiles the steps of a call that runs so."""
        return self._compiler if way.is_compiled else None


class Way(NamedTuple):
    """How a call runs.

    Attributes:
        segments: their number; 1: the plain loop.
        is_compiled: whether chunks of its steps are compiled.
        by_newton: whether Newton's method corrects the borders; then each step is a segment.
    """

    segments: int
    is_compiled: bool = False
    by_newton: bool = False


PLAIN = Way(1)


def by_newton(length: int) -> Way:
    """Return the way by Newton's method over T steps."""
    return Way(length, by_newton=True)


class Contest:
    """Finds the fastest way from the times of calls.

    Newton's method is kept if it is faster than the plain loop. Otherwise it climbs from a first estimate of the number
    of segments by factors of two. Then the fastest way, half as many segments, and the plain loop are compiled, if that
    is wanted, and fewer segments as long as that is faster. From time to time, and when weights have changed so much
    that segments need a longer burn-in, it starts again from the fastest way; where that is compiled, only the plain
    loop, compiled and as it is, and half as many segments are timed beside it.

    Attributes:
        fastest: the fastest way so far.

    Args:
        candidates: Newton's method, the first estimate of the number of segments, or both.
        compiled: T, if chunks of steps may be compiled, else ``None``.
    """

    def __init__(self, candidates: Sequence[Way], compiled: int | None):
        self.fastest = candidates[0]
        self._candidates, self._compiled = candidates, compiled
        self._queue, self._calls = [candidates[0], PLAIN], 0
        self._wait = self._left = _FIRST_WAIT
        self._burn = 0
        self._marks: dict[tuple[Way, str], list[tuple[Any, Any]]] = {}

    def next(self, most: int, burn: int) -> tuple[Way, bool]:
        """Return how the next call runs, in up to ``most`` segments, and whether it is timed.

        Args:
            most: the largest number of segments.
            burn: the number of burn-in steps that earlier passes have needed.
        """
        if self._queue and (self._calls >= _TURN or self._is_hopeless(self._queue[0])):
            self._queue.pop(0)
            self._calls = 0
            self._queue = self._queue or self._after_turns(most)
        if self._queue:
            self._calls += 1
            # The longest, as batches may differ: a choice is not made anew for each of them.
            self._burn = max(self._burn, burn)
            return self._queue[0], True
        self._left -= 1
        if self._left <= 0:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
        if self._left <= 0 or burn > _LONGER * self._burn:
            self._burn = burn
            self._begin_again()
        return self.fastest, False

    def _begin_again(self) -> None:
        """Let the next calls be timed."""
        self._left = self._wait
        plain = [PLAIN._replace(is_compiled=True)] if self.fastest.is_compiled else []
        first = self._candidates[0] if self.fastest == PLAIN else self.fastest
        self._queue = [*dict.fromkeys([first, *plain]), PLAIN]
        self._marks.clear()

    def _is_hopeless(self, way: Way) -> bool:
        """Return whether the first call of a turn took much longer than those of another way.

        That of a compiled way says nothing: it compiles.
        """
        times = self.times() if self._calls == 1 and not way.is_compiled else {}
        return way in times and times[way] > _HOPELESS * min(times.values())

    def note(self, way: Way, what: str, start: Any, end: Any) -> None:
        """Note the start and the end of a pass, "forward" or "backward"."""
        self._marks.setdefault((way, what), []).append((start, end))

    def times(self) -> dict[Way, float]:
        """Return the seconds of each way: of both passes, if both were timed for all of them."""
        ways = sorted({way for way, _ in self._marks})
        both = all((way, what) in self._marks for way in ways for what in ("forward", "backward"))
        passes = ("forward", "backward") if both else ("forward",)
        return {
            way: sum(min(seconds(*pair) for pair in self._marks.get((way, what), [(0.0, inf)])) for what in passes)
            for way in ways
        }

    def _after_turns(self, most: int) -> list[Way]:
        """Choose the fastest way; return those to time next."""
        times = self.times()
        best = min((way for way in times if way != PLAIN), key=times.__getitem__, default=PLAIN)
        self.fastest = best if times.get(best, 0.0) <= _GAIN * times.get(PLAIN, 0.0) else PLAIN
        if compiled := [way.segments for way in times if way.is_compiled]:
            cut = [count for count in compiled if count > 1]
            fewer = _even(min(cut) // 2, self._compiled or 1) if cut else 1
            # The starts of a compiled step's operations cost less, so that fewer segments may be faster.
            return [Way(fewer, True)] if fewer not in compiled and self.fastest == Way(min(cut), True) else []
        cuts = [way.segments for way in times if way != PLAIN and not way.by_newton]
        if self.fastest.by_newton or self._candidates[-1].by_newton:
            # Where all steps run at once, there are no chunks to compile: only those of the plain loop.
            return [] if self._compiled is None else [PLAIN._replace(is_compiled=True)]
        if not cuts:
            return [self._candidates[-1]]
        near = [cuts[0] // 4] if self.fastest == PLAIN and len(cuts) == 1 else []
        near = [best.segments // 2, best.segments * 2] if self.fastest != PLAIN else near
        fresh = [Way(count) for count in near if 2 <= count <= most and count not in cuts]
        if fresh or self._compiled is None:
            return fresh[:1]
        counts = [] if self.fastest == PLAIN else [best.segments, max(2, best.segments // 2)]
        return [*dict.fromkeys(Way(_even(count, self._compiled), True) for count in counts), Way(1, True)]


def _even(count: int, length: int) -> int:
    """Return the number of segments nearest to ``count`` that have whole chunks of steps, if there is one."""
    whole = [c for c in range(2, length // CHUNK + 1) if length % (c * CHUNK) == 0]
    return min(whole, key=lambda c: abs(log(c / count)), default=count)


@dataclass
class Stopwatch:
    """How one call runs, and its times.

    Attributes:
        way: how the call runs.
        contest: takes the times; ``None`` if the call is not timed.
        device: the call's device.
    """

    way: Way
    contest: Contest | None
    device: torch.device

    def __post_init__(self) -> None:
        self._start = self._mark()

    def _mark(self) -> Any:
        return None if self.contest is None else mark(self.device)

    def forward_ended(self) -> None:
        """Note the forward pass."""
        self._end("forward")

    def backward_started(self) -> None:
        """Start timing the backward pass."""
        self._start = self._mark()

    def backward_ended(self) -> None:
        """Note the backward pass."""
        self._end("backward")

    def time_backward(self, outputs: Any, first: Any) -> None:
        """Time the backward pass of the plain loop, from its ``outputs`` to the carry after the ``first`` steps."""
        if self.contest is None:
            return
        ends, starts = (
            [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.grad_fn is not None]
            for tree in (outputs, first)
        )
        if ends and starts:
            when_backward(ends, [self.backward_started])
            when_backward(starts, [self.backward_ended])

    def _end(self, what: str) -> None:
        if self.contest is not None:
            self.contest.note(self.way, what, self._start, self._mark())
