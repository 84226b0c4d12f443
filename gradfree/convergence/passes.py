"""Passes in sweeps: after a pass that did not converge, the next ones run sequentially for a while."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradfree.chains.chain import Chain
from gradfree.convergence.outcome import Outcome
from gradfree.time.forward import Recurrence, Trajectory

_FIRST_PAUSE = 50


@dataclass
class Pass:
    """A forward or backward pass through one chain that may run in sweeps.

    Attributes:
        path: the chain's name in messages and in ``memory``.
        what: "forward" or "backward".
        memory: the engine's tensors of the chain, which last from pass to pass.
        outcome: of the sweeps; ``None`` if the pass ran sequentially from the start, or has not run.
    """

    failure: ClassVar[str] = "does not converge"

    path: str
    what: str
    memory: dict[str, Tensor]
    outcome: Outcome | None = field(default=None, init=False)

    @property
    def key(self) -> str:
        """The name of this pass in ``memory``."""
        return f"{self.what} {self.path}"

    @property
    def is_paused(self) -> bool:
        """Whether the pass must run sequentially, because an earlier one has not converged."""
        return self._pause[0] > 0

    def learn(self, outcome: Outcome) -> None:
        """Learn from sweeps that have converged: by default nothing."""

    def remember(self) -> None:
        """Store the outcome: a pass that has not converged pauses sweeps for the next passes, longer each time.

        Where a backward pass follows, it calls this, so that a checkpoint's second forward pass runs like the first.
        """
        outcome, (wait, pause) = self.outcome, self._pause
        if outcome is None:
            if wait:
                self._keep(wait - 1, pause)
        elif outcome.settled:
            self.memory.pop(self._pause_key, None)
            self.learn(outcome)
        # A NaN mismatch says nothing about the next pass.
        elif outcome.mismatches[-1] == outcome.mismatches[-1]:
            self.pause()
            if not pause:
                warnings.warn(
                    f"{self.path or 'the recurrent layer'} {self.failure}: after {outcome.sweeps} sweeps the "
                    f"{self.what} pass was still off by {outcome.mismatches[-1]:.0e} (tolerance "
                    f"{outcome.tolerance:.0e}). It runs step by step now, which is right but no faster; sweeps are "
                    "tried again from time to time. max_sweeps allows more; the engine 'backprop' needs none.",
                    stacklevel=2,
                )

    def pause(self) -> None:
        """Let the next passes run sequentially, twice as many as the last time."""
        self._keep(*[2 * self._pause[1] or _FIRST_PAUSE] * 2)

    def report(self, offer: Callable[[str, Callable[[], Tensor]], None]) -> None:
        """Report the figures of the pass to :func:`gradfree.engine_figures`, by :meth:`Chain.offer` or the like."""
        outcome, prefix = self.outcome, "" if self.what == "backward" else f"{self.what} "
        if outcome is not None:
            offer(f"{prefix}sweeps", lambda: torch.tensor(float(outcome.sweeps)))
            offer(f"{prefix}mismatch", lambda: torch.tensor(outcome.mismatches[-1]))
            offer(f"{prefix}tolerance", lambda: torch.tensor(outcome.tolerance))
            offer(f"{prefix}sequential", lambda: torch.tensor(float(not outcome.settled)))

    @property
    def _pause_key(self) -> str:
        return f"pause {self.key}"

    @property
    def _pause(self) -> tuple[int, int]:
        """The number of passes that must still run sequentially, and the length of this pause."""
        kept = self.memory.get(self._pause_key)
        return (0, 0) if kept is None else (int(kept[0]), int(kept[1]))

    def _keep(self, wait: int, pause: int) -> None:
        # Always on the CPU, where reading it does not wait for a device.
        self.memory[self._pause_key] = torch.tensor([wait, pause], device="cpu")


def remembers_evaluation(forward: Callable[[Any, Recurrence], Trajectory | None]) -> Any:
    """Return a forward method of an engine that remembers its outcome if no backward pass will."""

    @wraps(forward)
    def remembering(options: Any, recurrence: Recurrence) -> Trajectory | None:
        found = forward(options, recurrence)
        if found is not None and not recurrence.trains:
            for each in found.passes:
                if isinstance(each, Pass):
                    each.remember()
        return found

    return remembering


def record_passes(chain: Chain, *passes: object) -> None:
    """Remember the outcomes of ``passes``, as far as they are a :class:`Pass`, and report their figures."""
    for each in passes:
        if isinstance(each, Pass):
            each.remember()
            if chain.figures is not None:
                each.report(chain.offer)
