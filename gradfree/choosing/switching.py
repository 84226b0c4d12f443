"""A handle that switches engines between training steps until the fastest is known."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gradfree.chains.handle import Handle
from gradfree.choosing.turns import Turns
from gradfree.torchside.optimizer_steps import AfterStep, StepCounter

KEY = "auto: choice"
"""The key of the choice and its times in checkpoints."""

_log = logging.getLogger("gradfree")


@dataclass(frozen=True)
class Candidate:
    """An engine that takes part in the choice.

    Attributes:
        name: of the engine in checkpoints.
        attach: attaches it to the model.
    """

    name: str
    attach: Callable[[], Handle]


class SwitchingHandle(Handle):
    """A handle whose candidates take turns in the first steps of a training; then the fastest one stays.

    Candidates change between two steps of an optimizer that trains the model. Graphs that are already recorded keep
    their engine. Waits for the device only once, after the last turn.

    Attributes:
        chosen: the name of the chosen candidate; ``None`` while they take turns.
        times: the seconds of a step with each candidate, by name; empty while they take turns.

    Args:
        candidates: the first one is attached at once.
        blocks: the modules that any candidate trains; steps of their optimizers count.
        rounds: the number of turns of each candidate.
    """

    def __init__(self, candidates: Sequence[Candidate], blocks: Mapping[str, nn.Module], rounds: int):
        super().__init__()
        self._candidates, self._all_blocks = candidates, blocks
        self._turns = Turns(len(candidates), rounds) if len(candidates) > 1 else None
        self._kept: dict[int, Mapping[str, Mapping[str, Any]]] = {}
        self._current = 0
        self._must_agree = False
        self.chosen = None if self._turns else candidates[0].name
        self.times: dict[str, float] = {}
        self.take_over(candidates[0].attach())
        self._steps: StepCounter | None = StepCounter(blocks, _step_callback(weakref.ref(self)), first_only=True)

    @property
    def attached(self) -> bool:
        """Whether this handle is attached, even if the current candidate puts nothing on the model."""
        return self._steps is not None

    @property
    def candidates(self) -> list[str]:
        """The names of the candidates, in the order of their turns."""
        return [candidate.name for candidate in self._candidates]

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The modules that any candidate trains."""
        return dict(self._all_blocks)

    def take_over(self, other: Handle) -> None:
        """Move the attached engine of ``other`` to this handle."""
        super().take_over(other)
        for attachment in self._attachments.values():
            attachment.has_rivals = len(self._candidates) > 1

    def detach(self) -> None:
        """Detach the current candidate and end the turns."""
        if self._steps is not None:
            self._steps.remove()
        self._steps = self._turns = None
        super().detach()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the choice and the state of the chosen engine; empty while the candidates take turns."""
        if self.chosen is None or not self.times:
            return {} if self._turns else super().state_dict()
        return super().state_dict() | {KEY: {"way": self.chosen, "times": dict(self.times)}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what :meth:`state_dict` returned; a loaded choice ends the turns."""
        rest = {path: kept for path, kept in state.items() if path != KEY}
        if (choice := state.get(KEY)) is None:
            if rest or self._turns is None:
                super().load_state_dict(rest)
        elif choice["way"] in self.candidates:
            self.times = dict(choice["times"])
            self._settle(self.candidates.index(choice["way"]))
            self._must_agree = False
            super().load_state_dict(rest)
        else:
            warnings.warn(
                f"the checkpoint has chosen {choice['way']}, which is not among the candidates here. They take turns: "
                f"{', '.join(self.candidates)}.",
                stacklevel=2,
            )

    def average_over_ranks(self) -> None:
        """Average the means; after the last turn, also choose the candidate with the smallest maximum over ranks."""
        super().average_over_ranks()
        if self._must_agree:
            self._must_agree = False
            times = torch.tensor([self.times[name] for name in self.candidates], device=self._parameter.device)
            distributed.all_reduce(times, distributed.ReduceOp.MAX)
            self._take_fastest(times.tolist())

    def step_ended(self) -> None:
        """End the timing of a step, after an optimizer step, and switch to the candidate whose turn is next."""
        if self._turns is None:
            return
        device = self._parameter.device
        self._turns.end(device)
        if self._turns.current is None:
            self._must_agree = True
            self._take_fastest(self._turns.times())
            return
        self._switch(self._turns.current)
        self._turns.begin(device)

    def _take_fastest(self, times: Sequence[float]) -> None:
        self.times = dict(zip(self.candidates, times, strict=True))
        before = self.chosen
        self._settle(min(range(len(times)), key=times.__getitem__))
        if self.chosen != before:
            steps = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in self.times.items())
            _log.info("auto takes %s; a step: %s", self.chosen, steps)

    def _settle(self, index: int) -> None:
        self._switch(index)
        self._turns, self._kept = None, {}
        self.chosen = self._candidates[index].name

    def _switch(self, index: int) -> None:
        if index != self._current:
            self._kept[self._current] = super().state_dict()
            super().detach()
            self._current = index
            self.take_over(self._candidates[index].attach())
            super().load_state_dict(self._kept.get(index, {}))

    @property
    def _parameter(self) -> Tensor:
        return next(p for block in self._all_blocks.values() for p in block.parameters())


def _step_callback(handle: weakref.ref[SwitchingHandle]) -> AfterStep:
    """Return a callback for torch's global hooks; it only has a weak reference, since torch keeps it for ever."""

    def after_step(blocks: Mapping[str, nn.Module], steps: int) -> None:
        if (mine := handle()) is not None:
            mine.step_ended()

    return after_step
