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
from gradfree.engines.feedback import FeedbackEngine
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import TAIL, LayerChain
from gradfree.layers.layer_site import KnownLayers
from gradfree.layers.roles import Convolution, Role, role_of


@dataclass(frozen=True, kw_only=True)
class DFA(FeedbackEngine):
    """Direct feedback alignment: every layer or block gets the error itself, through a fixed random matrix of its own.

    Nøkland, "Direct feedback alignment provides learning in deep neural networks", NeurIPS 2016, arXiv 1609.01596,
    eq. 9: δ_l = (B_l e) ⊙ f'(a_l), with e the error at the last layer with weights, which is exact. B_l e stands for
    the cotangent behind a layer's own activation, the pointwise functions and dropout that follow it, and is pulled
    through these exactly; what comes behind a pool or a flattening, the layer does not see. Layers before the chain
    get B_0 e. The paper leaves the scale of B_l open; see :class:`~gradfree.engines.feedback.FeedbackEngine`.

    Of plain layers it takes outputs (samples, classes); layers inside may have states of any shape.

    Of any other blocks, in depth, δ_i = e_i + δ_L B_i (Launay et al. 2020, arXiv 2006.12878): the cotangent of the last
    state, exact, through a matrix for each block, width by width. It acts on each token, the last dimension of a state,
    or on the channels of each pixel, the second one, where the block has a convolution in it. Inside of blocks
    everything is exact. All states have one shape; of a network in stages each is a chain.

    Args:
        seed: what the matrices are drawn from.
    """

    @property
    def kinds(self) -> list[type[Site]]:
        """Known layers, which are taken apart, and any other blocks."""
        return [KnownLayers, *(kind for kind in known_kinds() if kind.dimension == "depth" and not kind.of_layers)]

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients, of layers that are taken apart or of blocks."""
        if isinstance(chain, LayerChain):
            return super().gradients(chain, direct)
        assert isinstance(chain, DepthChain)
        delta, last = list(direct), direct[-1]
        with torch.autocast(last.device.type, enabled=False):
            # What lies before a block that does not use the state before it does not reach the end.
            for i in takewhile(lambda i: chain.links[i + 1].state is not None, reversed(range(len(chain) - 1))):
                delta[i] = plus(direct[i], self._through(chain, chain.links[i], last))
        return chain.gradients(delta)

    def _through(self, chain: DepthChain, link: Link, last: Tensor) -> Tensor:
        """Return the last state's cotangent times B of the block."""
        if link.out.shape != last.shape:
            raise ChainError(
                f"{link.path} returns {tuple(link.out.shape)}, the last block of {chain.path!r} {tuple(last.shape)}: "
                "DFA sends the cotangent of the last state to each block, so it takes states of one shape. Attach one "
                "chain for each shape: chains=[...]."
            )
        channels = 1 if any(isinstance(m, Convolution) for m in link.block.modules()) else -1
        width = last.shape[channels]
        matrix = self.matrix(chain.memory, link.path, (width, width), last)
        sent = last.movedim(channels, -1).to(matrix.dtype) @ matrix
        return sent.movedim(-1, channels).to(link.out.dtype)

    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients, the error of every layer by itself."""
        total = chain.zero()
        chain.add(chain.links[chain.last], error, total)
        for i, link in enumerate(chain.links[: chain.last]):
            if role_of(link.block) is Role.WEIGHTS:
                chain.add(link, self._behind(chain, error, i), total)
        if chain.links[0].state is None:
            return total
        return total._replace(initial=self._behind(chain, error, -1))

    def _behind(self, chain: LayerChain, error: Tensor, index: int) -> Tensor:
        """Return the cotangent at the output of link ``index``, of -1 at the chain's input: B e, pulled through."""
        end = index + 1
        while role_of(chain.links[end].block) in TAIL:
            end += 1
        delta = self.random_projection(chain, error, end)
        for link in reversed(chain.links[index + 1 : end]):
            delta = chain.pulled(link, delta)
        return delta
