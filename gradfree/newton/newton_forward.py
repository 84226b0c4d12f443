"""The forward pass of a recurrence by Newton's method, all steps at once."""

from __future__ import annotations

import torch

from gradfree.convergence.passes import Pass
from gradfree.newton.all_steps import AllSteps
from gradfree.newton.iteration import NewtonOptions, iterate
from gradfree.time.forward import Forward, Recurrence, Trajectory, run_each_direction, run_sequentially


class NewtonForward(Forward):
    """Starts from f(0, x) at all steps, then sweeps until convergence.

    Args:
        options: the engine's options.
    """

    def __init__(self, options: NewtonOptions):
        self.options = options

    def allows(self, recurrence: Recurrence) -> bool:
        """Return whether sequences have equal lengths, states are vectors, sweeps can pay and autocast is off."""
        x = recurrence.x
        if not recurrence.is_dense:
            return False
        # Under autocast, torch's kernels choose the precision of the outputs.
        if recurrence.mode is not None and torch.is_autocast_enabled(x.device.type):
            return False
        like = recurrence.first[0].flatten(0, -2)
        return self.options.stopping(len(x), like, recurrence.kind) is not None

    def run(self, recurrence: Recurrence) -> Trajectory:
        """Return outputs to the tolerance, or the sequential ones if sweeps do not converge.

        Raises:
            ChainError: the cell returns other states when it runs on all steps as one batch.
        """
        return run_each_direction(recurrence, self._run)

    def _run(self, recurrence: Recurrence) -> Trajectory:
        """Run one direction."""
        x, like = recurrence.x, recurrence.first[0].flatten(0, -2)
        (name,), (path,) = recurrence.names, recurrence.paths
        chain_pass = Pass(path, "forward", name, recurrence.memory.of("newton"))
        stopping = self.options.stopping(len(x), like, recurrence.kind)
        assert stopping is not None
        if chain_pass.is_paused:
            return run_sequentially(recurrence)._replace(passes=[chain_pass])
        steps = AllSteps.create(recurrence, self.options.jacobian)
        start = steps.start()
        states, outcome = iterate(steps.sweep, start, stopping, start, recurrence.kind == "separate units")
        chain_pass.outcome = outcome
        if not outcome.settled:
            return run_sequentially(recurrence)._replace(passes=[chain_pass])
        finals = [part[-1].view_as(first) for part, first in zip(states, recurrence.first, strict=True)]
        kept = () if recurrence.cell is None else tuple(states[1:])
        return Trajectory(states[0], finals, kept, [chain_pass])
