"""When the weights of a chain are led back to orthogonal ones: as they drift, or at a fixed pace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gradfree.devices.hardware import start_copy_to_cpu
from gradfree.orthogonal.weights import drift_along, far, matrices, project, retract

_LIMIT = 0.1
"""Drift that calls for a retraction."""
_DRIFTS, _PROBE = "drifts", "drift probe of "


class Retraction:
    """Leads weights back to orthogonal ones after an optimizer's steps.

    Args:
        memory: of the chain; keeps the drift last seen and, of each weight, the vector that it is measured along.
        every: steps from one retraction to the next; ``None`` for each weight as soon as its drift is seen to have
            passed 0.1. The drift is read a step late, when a GPU has long measured it: nothing waits for the device.
        newton_schulz_steps: of one retraction.
    """

    def __init__(self, memory: dict[str, Tensor], every: int | None, newton_schulz_steps: int):
        self._memory, self._every, self._steps = memory, every, newton_schulz_steps
        self._fetched: tuple[Tensor, Callable[[], Tensor]] | None = None

    def after_step(self, blocks: Mapping[str, nn.Module], count: int) -> None:
        """Do what is due after the ``count``-th step; weights that are far off the first time are projected."""
        weights = {path: weight for path, weight in matrices(blocks).items() if weight.requires_grad}
        # The count is in checkpoints: a run that is resumed, or restored behind a search, does what it would have.
        cold = far(weights) if count == (self._every or 1) else set()
        if self._every is None:
            due = self._drifted(weights) | cold
        else:
            due = set(weights) if count % self._every == 0 else set()
        # In the order of the layers, the same in every process.
        project(weight for path, weight in weights.items() if path in cold)
        retract([weight for path, weight in weights.items() if path in due], self._steps)
        if self._every is None:
            self._measure(weights)

    def _drifted(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the weights that had drifted at the step before."""
        seen = self._memory.get(_DRIFTS)
        if seen is None or len(seen) != len(weights):
            return set()
        # What comes from a checkpoint has not been fetched: then, once, this waits for the device.
        if self._fetched is not None and self._fetched[0] is seen:
            seen = self._fetched[1]()
        return {path for path, drift in zip(weights, seen.tolist(), strict=True) if not drift <= _LIMIT}

    def _measure(self, weights: Mapping[str, Tensor]) -> None:
        """Begin to measure all drifts, and to copy them to the CPU."""
        if weights:
            probes = [self._memory.get(_PROBE + path) for path in weights]
            products, drifts = drift_along(list(weights.values()), probes)
            self._memory.update(zip((_PROBE + path for path in weights), products, strict=True))
            self._memory[_DRIFTS] = drifts
            self._fetched = drifts, start_copy_to_cpu(drifts)
