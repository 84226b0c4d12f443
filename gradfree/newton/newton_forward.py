"""A recurrence run forward by Newton's method, all steps at once."""

from __future__ import annotations

import torch

from gradfree.convergence.passes import Pass
from gradfree.newton.all_steps import AllSteps
from gradfree.newton.iteration import iterate
from gradfree.newton.newton_options import NewtonOptions, NewtonPass
from gradfree.time.forward import Forward, Recurrence, Trajectory, run_each_direction, run_sequentially


class NewtonForward(Forward):
    """Any cell: f(0, x) at all steps, then sweeps until they change nothing.

    Args:
        options: the engine's.
    """

    def __init__(self, options: NewtonOptions):
        self.options = options

    def allows(self, recurrence: Recurrence) -> bool:
        """Return whether the sequences are whole, states vectors, and sweeps worth it; not under autocast."""
        x = recurrence.x
        if not recurrence.is_dense:
            return False
        # In which precision torch's kernels would run then is their own affair.
        if recurrence.mode is not None and torch.is_autocast_enabled(x.device.type):
            return False
        like = recurrence.first[0].flatten(0, -2)
        return self.options.stopping(len(x), like, recurrence.kind) is not None

    def run(self, recurrence: Recurrence) -> Trajectory:
        """Return outputs to the tolerance, or where they do not settle in time the sequential ones.

        Raises:
            ChainError: a cell that does not run on many steps as one batch.
        """
        return run_each_direction(recurrence, self._run)

    def _run(self, recurrence: Recurrence) -> Trajectory:
        """Run one direction."""
        x, like = recurrence.x, recurrence.first[0].flatten(0, -2)
        (name,), (path,) = recurrence.names, recurrence.paths
        chain_pass = Pass(path, "forward", name, recurrence.memory.of("newton"))
        stopping = self.options.stopping(len(x), like, recurrence.kind)
        assert stopping is not None
        if chain_pass.waits:
            return run_sequentially(recurrence)._replace(passes=[NewtonPass(chain_pass)])
        steps = AllSteps.create(recurrence, self.options.jacobian)
        start = steps.start()
        states, outcome = iterate(steps.sweep, start, stopping, start, recurrence.kind == "separate units")
        passes = [NewtonPass(chain_pass, outcome)]
        if not outcome.settled:
            return run_sequentially(recurrence)._replace(passes=passes)
        finals = [part[-1].view_as(first) for part, first in zip(states, recurrence.first, strict=True)]
        kept = () if recurrence.cell is None else tuple(states[1:])
        return Trajectory(states[0], finals, kept, passes)
