"""Random states to draw the same numbers again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of the generators that a layer on ``device`` may draw from."""

    device: torch.device
    cpu: Tensor
    own: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """Return the state of this moment."""
        own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), own)

    @property
    def moved(self) -> bool:
        """Whether numbers have been drawn since."""
        now = RandomState.of(self.device)
        same = torch.equal(now.cpu, self.cpu)
        return not (same and (self.own is None or now.own is None or torch.equal(now.own, self.own)))

    def restore(self) -> None:
        """Go back to this state."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.get_device_module(self.device).set_rng_state(self.own, self.device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Go back to this state inside the block, and forward again behind it."""
        devices = [] if self.own is None else [self.device]
        with torch.random.fork_rng(devices, device_type="cuda" if self.own is None else self.device.type):
            self.restore()
            yield
