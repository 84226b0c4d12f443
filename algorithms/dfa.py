"""Direct feedback alignment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from gradfree.algebra.cotangents import plus
from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.kinds import known_kinds
from gradfree.chains.site import Site
from gradfree.depth.depth_chain import DepthChain
from gradfree.depth.link import Link
from gradfree.errors import ChainError
from gradfree.feedback.random_feedback import FeedbackEngine
from gradfree.layers.layer_chain import ACTIVATION, LayerChain
from gradfree.layers.layer_site import KnownLayers
from gradfree.layers.roles import Convolution, Role, role_of


@dataclass(frozen=True, kw_only=True)
class DFA(FeedbackEngine):
    """Direct feedback alignment: every layer or block gets the output error through its own fixed random matrix.

    Nøkland, "Direct feedback alignment provides learning in deep neural networks", NeurIPS 2016, arXiv 1609.01596,
    eq. 9: δ_l = (B_l e) ⊙ f'(a_l), with e the exact error at the last layer with weights. B_l e replaces the cotangent
    after the layer's activation, that is after the pointwise functions and dropout that follow it. VJPs through these
    are exact. Layers after a pool or a flattening do not enter. Modules before the chain get B_0 e. The paper leaves
    the scale of B_l open; see :class:`~gradfree.feedback.random_feedback.RandomEngine`.

    In a chain of single layers, outputs must be (samples, classes); states inside may have any shape.

    In a chain of other blocks, δ_i = e_i + δ_L B_i (Launay et al. 2020, arXiv 2006.12878), with the exact cotangent
    δ_L of the last state and a matrix B_i (width, width) for each block. It acts on each token (the last dimension of a
    state) or, if the block contains a convolution, on the channels of each pixel (dimension 1). Gradients inside a
    block are exact. All states must have one shape; in a network of stages, each stage is a chain.

    Args:
        seed: of the random matrices.
    """

    @property
    def kinds(self) -> list[type[Site]]:
        """Single layers with known roles, and any other blocks in depth."""
        return [KnownLayers, *(kind for kind in known_kinds() if kind.dimension == "depth" and not kind.of_layers)]

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of a chain of single layers, or of other blocks."""
        if isinstance(chain, LayerChain):
            return super().gradients(chain, direct)
        assert isinstance(chain, DepthChain)
        delta, last = list(direct), direct[-1]
        with torch.autocast(last.device.type, enabled=False):
            # States before a block that ignores its input do not influence the last state.
            for i in takewhile(lambda i: chain.links[i + 1].state is not None, reversed(range(len(chain) - 1))):
                delta[i] = plus(direct[i], self._projected(chain, chain.links[i], last))
        return chain.gradients(delta)

    def _projected(self, chain: DepthChain, link: Link, last: Tensor) -> Tensor:
        """Return δ_L B, with ``last`` the cotangent δ_L of the last state and B the matrix of ``link``."""
        if link.out.shape != last.shape:
            raise ChainError(
                f"{link.path!r} returns {tuple(link.out.shape)}, the last block of {chain.path!r} {tuple(last.shape)}: "
                "DFA sends the cotangent of the last state to each block, so all states must have one shape. Attach "
                "one chain for each shape: chains=[...]."
            )
        channels = 1 if any(isinstance(m, Convolution) for m in link.block.modules()) else -1
        width = last.shape[channels]
        matrix = self.matrix(chain.memory, link.path, (width, width), last)
        projected = last.movedim(channels, -1).to(matrix.dtype) @ matrix
        return projected.movedim(-1, channels).to(link.out.dtype)

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients of every layer, from its own projection of the error."""
        total = chain.zero()
        chain.add(chain.links[chain.last], error, total)
        error = self.hidden_signal(chain, error)
        for i, link in enumerate(chain.links[: chain.last]):
            if role_of(link.block) is Role.WEIGHTS:
                chain.add(link, self._output_cotangent(chain, error, i), total)
        if chain.links[0].state is None:
            return total
        return total._replace(initial=self._output_cotangent(chain, error, -1))

    def hidden_signal(self, chain: LayerChain, error: Tensor) -> Tensor:
        """Return what all layers but the last get through their matrices, (N, classes): the error."""
        return error

    def _output_cotangent(self, chain: LayerChain, error: Tensor, index: int) -> Tensor:
        """Return the cotangent of the output of link ``index`` (-1: of the chain's input).

        That is the VJP of B e through the pointwise functions and dropout that follow.
        """
        end = index + 1
        while role_of(chain.links[end].block) in ACTIVATION:
            end += 1
        delta = self.random_projection(chain, error, end)
        for link in reversed(chain.links[index + 1 : end]):
            delta = chain.vjp(link, delta)
        return delta
