"""DeepPCR: exact gradients in O(log L) steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.cotangents import relative_change
from gradfree.algebra.cyclic_reduction import cyclic_reduction
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_positive
from gradfree.errors import ChainError

_WRONG, _WRONG_IN_DOUBLE = 0.05, 1e-6
"""A residual above this is not due to rounding, not even to that of bfloat16 inside blocks; and in float64."""


@dataclass(frozen=True, kw_only=True)
class DeepPCR(Engine):
    """Exact backpropagation in O(log L) steps: parallel cyclic reduction of the links' dense Jacobians.

    Danieli et al., "DeepPCR: Parallelizing sequential operations in neural networks", NeurIPS 2023, arXiv 2309.16318;
    only its backward pass, which is linear and so needs one reduction. For L links, B samples and H elements of a state
    it needs L·B·H² numbers and L·B·H³·log L multiplications. It is meant for narrow states and long chains.

    A pass in which samples of a batch mix (batch normalization in training) is refused. One VJP of all links checks the
    result against the model's own backward pass. If a block's backward pass is not linear, for example due to a hook
    that clamps gradients, the gradients are NaN instead of silently wrong.

    Args:
        memory_limit: the memory in GiB that the Jacobians and their products may take. A chain that needs more is
            refused in its first backward pass. It does not depend on free memory, so that a model that trains on one
            machine trains on all.
    """

    memory_limit: float = 2.0

    def __post_init__(self) -> None:
        check_positive(self, "memory_limit")

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients.

        Raises:
            ChainError: the Jacobians need more than ``memory_limit``, or samples mix.
        """
        terms = chain.vectors(direct)
        self._refuse_large(chain, terms)
        solution = cyclic_reduction(terms, chain.jacobians())
        delta = chain.cotangents(solution, direct)
        residual = relative_change(delta, chain.pull(direct, delta, chain.constant(0.0)))
        chain.offer("residual", lambda: residual)
        wrong = residual > (_WRONG_IN_DOUBLE if chain.like.dtype is torch.float64 else _WRONG)
        return chain.gradients(chain.cotangents(solution.masked_fill(wrong, float("nan")), direct))

    def _refuse_large(self, chain: Chain, terms: Tensor) -> None:
        _, batch, width = terms.shape
        links = len(chain) - 1
        # The Jacobians and the products of two consecutive rounds of the reduction: nearly as many each.
        size = 3 * links * batch * width * width * terms.element_size() / 2**30
        if size > self.memory_limit:
            raise ChainError(
                f"deeppcr would need {size:.3g} GiB for {chain.path!r}: {links} links of {batch} samples with dense "
                f"Jacobians of {width} x {width} in {terms.dtype}, and their products; memory_limit is "
                f"{self.memory_limit:g}. Raise it, take smaller batches or narrower states, or use the engine "
                "'backprop', which is exact, too."
            )
