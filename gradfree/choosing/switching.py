"""A handle behind which engines change between the steps of a training, until the fastest is known."""

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
"""What checkpoints call what was chosen, and why."""

_log = logging.getLogger("gradfree")


@dataclass(frozen=True)
class Candidate:
    """A way to the gradient.

    Attributes:
        name: what it is called in checkpoints.
        attach: puts it on the model.
    """

    name: str
    attach: Callable[[], Handle]


class SwitchingHandle(Handle):
    """The fastest of some candidates to the same gradient, once their first turns are over.

    Between two steps of an optimizer that trains the model, one way is taken off and the next put on; passes that were
    recorded before keep theirs. Nothing waits for a device until all turns are over, and then once.

    Attributes:
        chosen: the name of the way that was taken; ``None`` as long as they take turns.
        times: the seconds of a step with each way, by name; empty until then.

    Args:
        candidates: the first is on the model until an optimizer has taken a step.
        blocks: the modules that any of them trains, whose optimizer counts.
        rounds: turns of each.
    """

    def __init__(self, candidates: Sequence[Candidate], blocks: Mapping[str, nn.Module], rounds: int):
        super().__init__()
        self._candidates, self._all_blocks = candidates, blocks
        self._turns = Turns(len(candidates), rounds) if len(candidates) > 1 else None
        self._kept: dict[int, Mapping[str, Mapping[str, Any]]] = {}
        self._on = 0
        self._to_agree = False
        self.chosen = None if self._turns else candidates[0].name
        self.times: dict[str, float] = {}
        self.take_over(candidates[0].attach())
        self._steps: StepCounter | None = StepCounter(blocks, _ended_of(weakref.ref(self)), first_only=True)

    @property
    def attached(self) -> bool:
        """Whether a way is on the model, also one that puts nothing there."""
        return self._steps is not None

    @property
    def candidates(self) -> list[str]:
        """The names of the candidates, in the order of their turns."""
        return [way.name for way in self._candidates]

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks of all candidates."""
        return dict(self._all_blocks)

    def take_over(self, other: Handle) -> None:
        """Take over what ``other`` has."""
        super().take_over(other)
        for attachment in self._attachments.values():
            attachment.has_rivals = len(self._candidates) > 1

    def detach(self) -> None:
        """Take off the way that is on, and end the turns."""
        if self._steps is not None:
            self._steps.remove()
        self._steps = self._turns = None
        super().detach()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what the way keeps and, if there was one, the choice; nothing as long as the candidates take turns."""
        if self.chosen is None or not self.times:
            return {} if self._turns else super().state_dict()
        return super().state_dict() | {KEY: {"way": self.chosen, "times": dict(self.times)}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up a choice, if there is one: the candidates take no more turns then."""
        rest = {path: kept for path, kept in state.items() if path != KEY}
        if (choice := state.get(KEY)) is None:
            if rest or self._turns is None:
                super().load_state_dict(rest)
        elif choice["way"] in self.candidates:
            self.times = dict(choice["times"])
            self._settle(self.candidates.index(choice["way"]))
            self._to_agree = False
            super().load_state_dict(rest)
        else:
            warnings.warn(
                f"the checkpoint has chosen {choice['way']}, which is not among the candidates here. They take turns: "
                f"{', '.join(self.candidates)}.",
                stacklevel=2,
            )

    def average_over_ranks(self) -> None:
        """Average as usual; behind the last turn, let all ranks take the way that is fastest on the slowest of them."""
        super().average_over_ranks()
        if self._to_agree:
            self._to_agree = False
            times = torch.tensor([self.times[way] for way in self.candidates], device=self._parameter.device)
            distributed.all_reduce(times, distributed.ReduceOp.MAX)
            self._take_fastest(times.tolist())

    def step_ended(self) -> None:
        """Take note that an optimizer has taken a step; it may be the next way's turn."""
        if self._turns is None:
            return
        device = self._parameter.device
        self._turns.end(device)
        if self._turns.way is None:
            self._to_agree = True
            self._take_fastest(self._turns.times())
            return
        self._switch(self._turns.way)
        self._turns.begin(device)

    def _take_fastest(self, times: Sequence[float]) -> None:
        self.times = dict(zip(self.candidates, times, strict=True))
        before = self.chosen
        self._settle(min(range(len(times)), key=times.__getitem__))
        if self.chosen != before:
            steps = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in self.times.items())
            _log.info("auto takes %s; a step: %s", self.chosen, steps)

    def _settle(self, way: int) -> None:
        self._switch(way)
        self._turns, self._kept = None, {}
        self.chosen = self._candidates[way].name

    def _switch(self, way: int) -> None:
        if way != self._on:
            self._kept[self._on] = super().state_dict()
            super().detach()
            self._on = way
            self.take_over(self._candidates[way].attach())
            super().load_state_dict(self._kept.get(way, {}))

    @property
    def _parameter(self) -> Tensor:
        return next(p for block in self._all_blocks.values() for p in block.parameters())


def _ended_of(handle: weakref.ref[SwitchingHandle]) -> AfterStep:
    """Return what torch holds for ever, and holds no handle."""

    def after_step(blocks: Mapping[str, nn.Module], steps: int) -> None:
        if (mine := handle()) is not None:
            mine.step_ended()

    return after_step
