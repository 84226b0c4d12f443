"""Random states: save and restore them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from gradfree.devices.hardware import random_state, set_random_state


@dataclass(frozen=True)
class RandomState:
    """The states of the generators that a layer on ``device`` may use: the CPU's and the device's ``own``."""

    device: torch.device
    cpu: Tensor
    own: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """Return the current state."""
        return cls(device, torch.get_rng_state(), random_state(device))

    def restore(self) -> None:
        """Go back to this state."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            set_random_state(self.device, self.own)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Use this state inside the ``with``, and restore the present one afterwards."""
        with torch_states_kept([self.device]):
            self.restore()
            yield


@contextmanager
def torch_states_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the random states of the CPU and of ``devices``, of any type, after the ``with``."""
    states = [RandomState.of(device) for device in {torch.device("cpu"), *devices}]
    try:
        yield
    finally:
        for state in states:
            state.restore()


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states of Python and numpy after the ``with``."""
    before = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])  # noqa: NPY002
