"""When to retract the weights of a chain to orthogonal ones: after a drift, or every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gradfree.devices.hardware import start_copy_to_cpu
from gradfree.orthogonal.weights import drift_along, far, matrices, project, retract

_LIMIT = 0.1
"""A larger drift is retracted."""
_DRIFTS, _PROBE = "drifts", "drift probe of "


class Retraction:
    """Retracts weights to orthogonal ones after optimizer steps.

    Args:
        memory: of the chain; stores the last drifts and, for each weight, the vector of the power method.
        every: steps from one retraction to the next; ``None`` retracts each weight once its drift has passed 0.1. The
            drift is read one step late, so that the host does not wait for the device.
        newton_schulz_steps: of one retraction.
    """

    def __init__(self, memory: dict[str, Tensor], every: int | None, newton_schulz_steps: int):
        self._memory, self._every, self._steps = memory, every, newton_schulz_steps
        self._fetched: tuple[Tensor, Callable[[], Tensor]] | None = None

    def after_step(self, blocks: Mapping[str, nn.Module], count: int) -> None:
        """Retract the weights that are due after step ``count``; at the first time, project those that are far off."""
        weights = {path: weight for path, weight in matrices(blocks).items() if weight.requires_grad}
        # `count` is in checkpoints, so a resumed run does the same as one without a stop.
        distant = far(weights) if count == (self._every or 1) else set()
        if self._every is None:
            due = self._drifted(weights) | distant
        else:
            due = set(weights) if count % self._every == 0 else set()
        # In the order of the layers, so that it is the same in every process.
        project(weight for path, weight in weights.items() if path in distant)
        retract([weight for path, weight in weights.items() if path in due], self._steps)
        if self._every is None:
            self._measure(weights)

    def _drifted(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the weights whose drift was too large one step ago."""
        seen = self._memory.get(_DRIFTS)
        if seen is None or len(seen) != len(weights):
            return set()
        # A value from a checkpoint is not on the CPU yet: reading it waits for the device, once.
        if self._fetched is not None and self._fetched[0] is seen:
            seen = self._fetched[1]()
        return {path for path, drift in zip(weights, seen.tolist(), strict=True) if not drift <= _LIMIT}

    def _measure(self, weights: Mapping[str, Tensor]) -> None:
        """Start to measure all drifts and to copy them to the CPU."""
        if weights:
            probes = [self._memory.get(_PROBE + path) for path in weights]
            products, drifts = drift_along(list(weights.values()), probes)
            self._memory.update(zip((_PROBE + path for path in weights), products, strict=True))
            self._memory[_DRIFTS] = drifts
            self._fetched = drifts, start_copy_to_cpu(drifts)
