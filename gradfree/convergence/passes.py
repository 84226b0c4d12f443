"""What a chain remembers of passes that did not settle, and what it reports of every pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradfree.chains.chain import Chain
from gradfree.convergence.outcome import Outcome
from gradfree.devices.costs import own_kernel_is_faster
from gradfree.time.forward import LayerCall

_FIRST_PAUSE = 50


@dataclass(frozen=True)
class Pass:
    """One pass through one chain that may run in sweeps.

    Attributes:
        path: what the chain is called.
        what: "forward" or "backward".
        name: of the chain in ``memory``.
        memory: what the engine keeps of it from pass to pass.
    """

    path: str
    what: str
    name: str
    memory: dict[str, Tensor]

    @property
    def key(self) -> str:
        """What is kept of it is called so."""
        return f"{self.what} {self.name}"

    @property
    def waits(self) -> bool:
        """Whether such passes are to run sequentially, as one has not settled before."""
        return self._pause[0] > 0

    def learn(self, outcome: Outcome | None, failed: str) -> None:
        """Keep how the pass went: one that has not settled makes the next ones wait, longer each time.

        Only backward passes call it, so that what a checkpoint runs forward again goes the way that it went first.

        Args:
            outcome: how it went; ``None`` if sequentially from the start.
            failed: what a warning says the first time, behind the chain's name.
        """
        wait, pause = self._pause
        if outcome is None:
            if wait:
                self._keep(wait - 1, pause)
        elif outcome.settled:
            self.memory.pop(self._pause_key, None)
        # A pass of NaN says nothing about the next one.
        elif outcome.mismatches[-1] == outcome.mismatches[-1]:
            self._keep(*[2 * pause or _FIRST_PAUSE] * 2)
            if not pause:
                warnings.warn(f"{self.path or 'the recurrent layer'} {failed}", stacklevel=2)

    def report(self, chain: Chain, outcome: Outcome) -> None:
        """Offer the figures of the pass to those who ask: :func:`gradfree.engine_figures`."""
        prefix = "" if self.what == "backward" else f"{self.what} "
        figures = {
            "sweeps": outcome.sweeps,
            "mismatch": outcome.mismatches[-1],
            "sequential": not outcome.settled,
        }
        for name, figure in figures.items():
            chain.offer(prefix + name, lambda figure=figure: torch.tensor(float(figure)))  # type: ignore[misc]

    @property
    def _pause_key(self) -> str:
        return f"pause {self.key}"

    @property
    def _pause(self) -> tuple[int, int]:
        """The passes to run sequentially: how many are left, and of how many."""
        kept = self.memory.get(self._pause_key)
        return (0, 0) if kept is None else (int(kept[0]), int(kept[1]))

    def _keep(self, wait: int, pause: int) -> None:
        # On the CPU whatever torch.set_default_device says, where to look is no wait.
        self.memory[self._pause_key] = torch.tensor([wait, pause], device="cpu")


def left_to_torch(call: LayerCall, owner: str, swept: bool) -> Callable[[], None] | None:
    """Leave a layer to torch's kernel where that is faster than the closed form, and no sweeps are tried.

    Args:
        call: of the layer.
        owner: of what is remembered of its passes.
        swept: whether sizes and options allow sweeps.

    Returns:
        What :meth:`gradfree.Engine.leave_to_torch` returns: it counts this pass in the pause of each paused chain.
    """
    chains = zip(call.paths, call.names, strict=True)
    memory = call.memory.of(owner)
    passes = [Pass(path, what, name, memory) for path, name in chains for what in ("forward", "backward")]
    tried = swept and not any(each.waits for each in passes)
    if tried or not own_kernel_is_faster(call.mode, call.length, call.like, call.packed):
        return None

    def learn() -> None:
        for each in passes:
            each.learn(None, "")

    return learn
