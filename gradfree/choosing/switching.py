"""A handle behind which engines change between the steps of a training, until the fastest is known."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gradfree.chains.handle import Handle
from gradfree.choosing.turns import Turns
from gradfree.torchside.optimizer_steps import Boundaries

KEY = "auto: choice"
"""What checkpoints call what was chosen, and why."""

_log = logging.getLogger("gradfree")


@dataclass(frozen=True)
class Way:
    """A way to the gradient.

    Attributes:
        name: what it is called in checkpoints.
        attach: puts it on the model.
    """

    name: str
    attach: Callable[[], Handle]


class SwitchingHandle(Handle):
    """The fastest of some ways to the same gradient, once their first turns are over.

    Between two steps of an optimizer that trains the model, one way is taken off and the next put on; passes that were
    recorded before keep theirs. In the first step of a way its gradients are compared with backpropagation's, which
    are the ones that the step gets: where they are further off than allowed, the way is not taken. Nothing waits for a
    device until all turns are over, and then once.

    Attributes:
        chosen: the name of the way that was taken; ``None`` as long as they take turns.
        times: the seconds of a step with each way, by name; empty until then.
        errors: likewise, the relative error of the gradients in its first step; without those that have none.

    Args:
        ways: the first is on the model until an optimizer has taken a step.
        blocks: the modules that any of them trains, whose optimizer counts.
        allowed: the largest relative error, by dtype of the weights.
        rounds: turns of each; ``None``: as many as usual.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        blocks: Mapping[str, nn.Module],
        allowed: Callable[[torch.dtype], float],
        rounds: int | None = None,
    ):
        super().__init__()
        self._ways, self._all_blocks, self._allowed = ways, blocks, allowed
        self._turns: Turns | None = Turns(len(ways)) if rounds is None else Turns(len(ways), rounds)
        self._kept: dict[int, Mapping[str, Mapping[str, Any]]] = {}
        self._differences: dict[int, Tensor] = {}
        self._on = 0
        self._to_agree = False
        self.chosen: str | None = None
        self.times: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.become(ways[0].attach())
        self._boundaries = Boundaries(blocks.values(), self._step_ended)
        if len(ways) == 1:
            self._turns, self.chosen = None, ways[0].name

    @property
    def attached(self) -> bool:
        """Whether a way is on the model, also one that puts nothing there."""
        return self._boundaries.watched

    @property
    def ways(self) -> list[str]:
        """The names of the ways, in the order of their turns."""
        return [way.name for way in self._ways]

    @property
    def figures(self) -> dict[str, float]:
        """Which of the ways is on the model, by its number from 0."""
        return {"way": float(self._on)}

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks of all ways."""
        return dict(self._all_blocks)

    def become(self, other: Handle) -> None:
        """Take over what ``other`` has; its chains report which way it is."""
        super().become(other)
        for attachment in self._attachments.values():
            attachment.contested = len(self._ways) > 1
            attachment.extra_metrics = {name: torch.tensor(figure) for name, figure in self.figures.items()}

    def detach(self) -> None:
        """Take off the way that is on, and end the turns."""
        self._boundaries.remove()
        self._turns = None
        super().detach()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return what the way keeps and, if there was one, the choice; nothing as long as the ways take turns."""
        if self.chosen is None or not self.times:
            return {} if self._turns else super().state_dict()
        return super().state_dict() | {
            KEY: {"way": self.chosen, "times": dict(self.times), "errors": dict(self.errors)}
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up a choice, if there is one: the ways take no more turns then."""
        rest = {path: kept for path, kept in state.items() if path != KEY}
        names = self.ways
        if (choice := state.get(KEY)) is None:
            if rest or self._turns is None:
                super().load_state_dict(rest)
        elif choice["way"] in names:
            self.times, self.errors = dict(choice["times"]), dict(choice["errors"])
            self._settle(names.index(choice["way"]))
            self._to_agree = False
            super().load_state_dict(rest)
        else:
            warnings.warn(
                f"the checkpoint has chosen {choice['way']}, which does not fit here: {', '.join(names)} take turns.",
                stacklevel=2,
            )

    def average_over_ranks(self) -> None:
        """Average as usual; behind the last turn, let all ranks take the way that is fastest on the slowest of them."""
        super().average_over_ranks()
        if self._to_agree:
            self._to_agree = False
            times = torch.tensor([self.times.get(way.name, inf) for way in self._ways], device=self._parameter.device)
            distributed.all_reduce(times, distributed.ReduceOp.MAX)
            self._take_fastest(times.tolist())

    def _step_ended(self) -> None:
        if self._turns is None:
            return
        device = self._parameter.device
        self._turns.end(device)
        if (seen := self.compared()) is not None:
            self._differences[self._on] = seen
        self.compare(False)
        if self._turns.way is None:
            self._to_agree = True
            self._decide(self._turns)
            return
        self._switch(self._turns.way)
        if self._turns.first:
            self.compare(True)
        self._turns.begin(device)

    def _decide(self, turns: Turns) -> None:
        allowed = self._allowed(self._parameter.dtype)
        times = turns.times()
        found = {n: seen.sum(0).tolist() for n, seen in self._differences.items()}
        errors = {n: (off / exact) ** 0.5 if exact else inf for n, (_, _, exact, off) in found.items()}
        self.errors = {self._ways[n].name: error for n, error in errors.items()}
        # Not "error > allowed": NaN is, too.
        self._take_fastest([time if errors.get(n, 0.0) <= allowed else inf for n, time in enumerate(times)])

    def _take_fastest(self, times: Sequence[float]) -> None:
        self.times = {way.name: time for way, time in zip(self._ways, times, strict=True) if time < inf}
        before = self.chosen
        self._settle(min(range(len(times)), key=times.__getitem__))
        if self.chosen != before:
            steps = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in self.times.items())
            far = [f"{name}: a gradient off by {e:.1g}" for name, e in self.errors.items() if name not in self.times]
            _log.info("auto takes %s; a step: %s", self.chosen, "; ".join([steps, *far]))

    def _settle(self, way: int) -> None:
        self.compare(False)
        self._switch(way)
        self._turns, self._kept, self._differences = None, {}, {}
        self.chosen = self._ways[way].name

    def _switch(self, way: int) -> None:
        if way != self._on:
            self._kept[self._on] = super().state_dict()
            super().detach()
            self._on = way
            self.become(self._ways[way].attach())
            super().load_state_dict(self._kept.get(way, {}))

    @property
    def _parameter(self) -> Tensor:
        return next(p for block in self._all_blocks.values() for p in block.parameters())
