"""Random states: save and restore them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from gradfree.devices.hardware import random_state, set_random_state


class RandomState:
    """The present random states of Python, numpy, and torch's generators of the CPU and of ``devices``, of any type."""

    def __init__(self, *devices: torch.device):
        self._of_python, self._of_numpy = random.getstate(), numpy.random.get_state()  # noqa: NPY002
        self._states = {device: random_state(device) for device in {torch.device("cpu"), *devices}}

    def restore(self) -> None:
        """Go back to this state."""
        random.setstate(self._of_python)
        numpy.random.set_state(self._of_numpy)  # noqa: NPY002
        for device, state in self._states.items():
            set_random_state(device, state)

    def has_drawn(self) -> bool:
        """Return whether one of the generators has drawn since."""
        return (
            random.getstate() != self._of_python
            or not all(map(numpy.array_equal, numpy.random.get_state(), self._of_numpy))  # noqa: NPY002
            or not all(torch.equal(random_state(device), state) for device, state in self._states.items())
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Use this state inside the ``with``, and restore the present one afterwards."""
        present = RandomState(*self._states)
        self.restore()
        try:
            yield
        finally:
            present.restore()


@contextmanager
def drawing_apart(number: int, device: torch.device) -> Iterator[None]:
    """Draw other random numbers inside the ``with``, and go on behind it as if nothing had been drawn.

    Processes with equal states have equal ones inside and behind it, however much each of them draws inside.

    Args:
        number: distinguishes several uses with the same state.
        device: whose generator the model draws from, besides those of the CPU.
    """
    before = RandomState(device)
    seed = (int(torch.randint(2**32, (), dtype=torch.int64, device="cpu")) + number) % 2**32  # The most numpy takes.
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    try:
        yield
    finally:
        before.restore()
