"""The backward pass of a chain in time by Newton's method. It is linear: with K = F one step is exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradfree.algebra.block_scan import block_scan, clamped
from gradfree.chains.chain import ChainGradients
from gradfree.convergence.outcome import Outcome, StoppingRule, largest, relative
from gradfree.convergence.passes import Pass, record_passes
from gradfree.newton.iteration import NewtonOptions, iterate
from gradfree.time.closed_forms import State
from gradfree.time.time_chain import TimeChain


def newton_gradients(chain: TimeChain, direct: State, options: NewtonOptions) -> ChainGradients:
    """Return the gradients of ``chain`` to the tolerance, or the exact ones if sweeps do not converge.

    Args:
        chain: any chain in time.
        direct: the direct cotangents of its states.
        options: the engine's options.
    """
    stopping = options.stopping(len(chain), chain.like[0], chain.kind)
    backward: Pass | None = None
    delta: State | None = None
    if stopping is not None and all(e is None or (e.dim() == 3 and not e.is_complex()) for e in direct):
        backward = Pass(chain.path, "backward", chain.memory.of("newton"))
        if not backward.is_paused:
            found, backward.outcome = _solve(chain, direct, options, stopping)
            delta = found if backward.outcome.settled else None
    record_passes(chain, chain.forward_pass, backward)
    return chain.backpropagate(direct) if delta is None else chain.gradients(delta)


def _solve(chain: TimeChain, direct: State, options: NewtonOptions, stopping: StoppingRule) -> tuple[State, Outcome]:
    terms = [torch.zeros_like(s) if e is None else e for e, s in zip(direct, chain.states, strict=True)]
    exact = chain.kind == "separate units"
    blocks = chain.unit_blocks(options.jacobian == "gate")
    # Transposed, as cotangents are row vectors.
    blocks = list(zip(*(blocks if exact else clamped(blocks)), strict=True))
    zero = chain.constant(0.0)

    def residual(delta: Sequence[Tensor]) -> list[Tensor]:
        once_more = chain.pull(tuple(terms), tuple(delta), zero)
        return [new - part for new, part in zip(once_more, delta, strict=True)]

    def sweep(delta: Sequence[Tensor]) -> list[Tensor]:
        changes = block_scan(residual(delta), blocks, reverse=True)
        return [part + change for part, change in zip(delta, changes, strict=True)]

    delta: Sequence[Tensor] = block_scan(terms, blocks, reverse=True)
    if exact:
        mismatch = relative(residual(delta), [largest(part) for part in delta])
        if mismatch <= stopping.tolerance:
            return tuple(delta), Outcome(stopping.tolerance, 0, [mismatch], settled=True)
    delta, outcome = iterate(sweep, delta, stopping, [*terms, *chain.states])
    return tuple(delta), outcome
