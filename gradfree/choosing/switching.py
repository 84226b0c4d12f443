"""A handle that switches engines between training steps until the fastest is known."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from gradfree.chains.handle import Handle
from gradfree.devices.hardware import mark, seconds
from gradfree.torchside.optimizer_steps import AfterStep, StepCounter

KEY = "auto: choice"
"""The key of the choice and its times in checkpoints."""

_STEPS = 9
"""The number of steps of a turn; the first one only warms up."""

_log = logging.getLogger("gradfree")


class SwitchingHandle(Handle):
    """A handle whose candidates take turns in the first steps of a training; then the fastest one stays.

    Candidates change between two steps of an optimizer that trains the model. Graphs that are already recorded keep
    their engine. Waits for the device only once, after the last turn.

    Attributes:
        candidates: the names of the candidates, in the order of their turns.
        chosen: the name of the chosen candidate; ``None`` while they take turns.
        times: the seconds of a step with each candidate, by name; empty while they take turns.

    Args:
        candidates: functions that attach them, by name; the first one is attached at once.
        blocks: the modules that any candidate trains; steps of their optimizers count.
    """

    def __init__(self, candidates: Mapping[str, Callable[[], Handle]], blocks: Mapping[str, nn.Module]):
        super().__init__()
        self._attach, self._all_blocks = candidates, blocks
        self.candidates = list(candidates)
        self.chosen = None if len(candidates) > 1 else self.candidates[0]
        self.times: dict[str, float] = {}
        self._ends: list[Any] = []
        self._current = ""
        self._switch(self.candidates[0])
        self._steps: StepCounter | None = StepCounter(blocks, _step_callback(weakref.ref(self)), first_only=True)

    @property
    def attached(self) -> bool:
        """Whether this handle is attached, even if the current candidate puts nothing on the model."""
        return self._steps is not None

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The modules that any candidate trains."""
        return dict(self._all_blocks)

    def detach(self) -> None:
        """Detach the current candidate and end the turns."""
        if self._steps is not None:
            self._steps.remove()
        self._steps = None
        super().detach()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the choice and the state of the chosen engine; empty while the candidates take turns."""
        if self.chosen is None:
            return {}
        choice = {KEY: {"way": self.chosen, "times": dict(self.times)}} if self.times else {}
        return super().state_dict() | choice

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what :meth:`state_dict` returned; a loaded choice ends the turns, if it is among the candidates."""
        choice = state.get(KEY)
        if choice is None:
            super().load_state_dict(state)
        elif choice["way"] in self.candidates:
            before, chosen, times = self._current, self.chosen, self.times
            self._settle(choice["way"], choice["times"])
            try:
                super().load_state_dict({path: kept for path, kept in state.items() if path != KEY})
            except ValueError:
                self._switch(before)
                self.chosen, self.times = chosen, times
                raise

    def load_own(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the entries of ``state`` for this handle: first the choice, which decides which chains there are."""
        if KEY in state:
            self.load_state_dict({KEY: state[KEY]})
        super().load_own(state)

    def step_ended(self) -> None:
        """Note the time of an optimizer step, and switch to the candidate whose turn is next."""
        if self.chosen is not None:
            return
        device = next(p.device for block in self._all_blocks.values() for p in block.parameters())
        self._ends.append(mark(device))
        turn = len(self._ends) // _STEPS
        if turn < len(self.candidates):
            self._switch(self.candidates[turn])
            return
        times = self.measured()
        fastest = min(times, key=times.__getitem__)
        self._settle(fastest, times)
        steps = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in times.items())
        _log.info("auto takes %s; a step: %s", fastest, steps)

    def measured(self) -> dict[str, float]:
        """Return the lower quartile of each candidate's step times in seconds; waits for the device.

        The lower quartile, since other work on the machine only makes steps longer.
        """
        turns = [self._ends[n * _STEPS : (n + 1) * _STEPS] for n in range(len(self.candidates))]
        times = [sorted(map(seconds, ends[:-1], ends[1:])) for ends in turns]
        return {name: of_turn[len(of_turn) // 4] for name, of_turn in zip(self.candidates, times, strict=True)}

    def _settle(self, name: str, times: Mapping[str, float]) -> None:
        self._switch(name)
        self.chosen, self.times = name, dict(times)

    def _switch(self, name: str) -> None:
        """Attach a candidate in place of the current one, and become its handle."""
        if name == self._current:
            return
        super().detach()
        self._current = name
        vars(self).update(vars(self._attach[name]()))
        for attachment in self.attachments.values():
            attachment.has_rivals = len(self.candidates) > 1


def _step_callback(handle: weakref.ref[SwitchingHandle]) -> AfterStep:
    """Return a callback for torch's global hooks; it only has a weak reference, since torch keeps it for ever."""

    def after_step(blocks: Mapping[str, nn.Module], steps: int) -> None:
        if (mine := handle()) is not None:
            mine.step_ended()

    return after_step
