"""The forward pass of a recurrence by Newton's method, all steps at once."""

from __future__ import annotations

import torch

from gradfree.convergence.passes import Pass, remembers_evaluation
from gradfree.newton.all_steps import ElementwiseSteps, TorchCellSteps
from gradfree.newton.iteration import NewtonOptions, iterate
from gradfree.time.forward import Recurrence, Trajectory, run_sequentially


@remembers_evaluation
def newton_forward(options: NewtonOptions, recurrence: Recurrence) -> Trajectory | None:
    """Start from f(0, x) at all steps and sweep until convergence, or else run step by step.

    Args:
        options: the engine's options.
        recurrence: in one direction.

    Returns:
        The trajectory; ``None`` if sequences have several lengths, states are no vectors, sweeps cannot pay, or torch's
        layers run under autocast, where their kernels choose the precision of the outputs.

    Raises:
        ChainError: the cell returns other states when it runs on all steps as one batch.
    """
    x, by_torch = recurrence.x, recurrence.cell is None
    if not recurrence.is_dense or (by_torch and torch.is_autocast_enabled(x.device.type)):
        return None
    stopping = options.stopping(len(x), recurrence.first[0][0], recurrence.kind)
    if stopping is None:
        return None
    (path,) = recurrence.paths
    chain_pass = Pass(path, "forward", recurrence.memory.of("newton"))
    if chain_pass.is_paused:
        return run_sequentially(recurrence)._replace(passes=[chain_pass])
    steps = (TorchCellSteps if by_torch else ElementwiseSteps)(recurrence, options.jacobian)
    start = steps.start()
    states, chain_pass.outcome = iterate(steps.sweep, start, stopping, start, masks=not by_torch)
    if not chain_pass.outcome.settled:
        return run_sequentially(recurrence)._replace(passes=[chain_pass])
    return Trajectory(states[0], [part[-1:] for part in states], () if by_torch else tuple(states[1:]), [chain_pass])
