"""DeepPCR: exact gradients in O(log L) steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradfree.algebra.cotangents import relative_change
from gradfree.algebra.cyclic_reduction import cyclic_reduction
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.refusals import refuse_large_jacobians
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_positive

# No rounding makes as much, not that of bfloat16 inside of blocks.
_WRONG = 0.05


@dataclass(frozen=True, kw_only=True)
class DeepPCR(Engine):
    """Exact backpropagation in O(log L) steps: parallel cyclic reduction of the links' dense Jacobians.

    Danieli et al., "DeepPCR: Parallelizing sequential operations in neural networks", NeurIPS 2023, arXiv 2309.16318,
    of which this is the backward pass: linear, so that one reduction does. For L links, B samples and H elements of a
    state it takes L·B·H² numbers and L·B·H³·log L multiplications: for narrow states and long chains.

    Samples must not mix (batch normalization in training does), or the pass is refused. One pull shows whether the
    result is what the model's own backward pass leads to: of blocks whose backward pass is not linear, such as with a
    hook that clamps gradients, the gradients are NaN rather than wrong.

    Args:
        memory_limit: in GiB, of what the Jacobians and their products may take at most. A chain that needs more
            is refused at its first backward pass. A number, not a share of what is free, so that a model that trains
            once trains everywhere.
    """

    memory_limit: float = 2.0

    def __post_init__(self) -> None:
        check_positive(self, "memory_limit")

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients.

        Raises:
            ChainError: the Jacobians do not fit, or there are none for each sample.
        """
        terms = chain.vectors(direct)
        remedy = "the engine 'backprop', which is exact, too"
        refuse_large_jacobians("deeppcr", chain.path, len(chain) - 1, terms[0], self.memory_limit, remedy)
        solution = cyclic_reduction(terms, chain.jacobians())
        delta = chain.cotangents(solution, direct)
        residual = relative_change(delta, chain.pull(direct, delta, chain.constant(0.0)))
        chain.offer("residual", lambda: residual)
        return chain.gradients(chain.cotangents(solution.masked_fill(residual > _WRONG, float("nan")), direct))
