"""Direct feedback alignment."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradfree.chains.chain import ChainGradients
from gradfree.engines.feedback import FeedbackEngine
from gradfree.layers.layer_chain import TAIL, LayerChain
from gradfree.layers.roles import Role, role_of


@dataclass(frozen=True, kw_only=True)
class DFA(FeedbackEngine):
    """Direct feedback alignment: every layer gets the error itself, through a fixed random matrix of its own.

    Nøkland, "Direct feedback alignment provides learning in deep neural networks", NeurIPS 2016, arXiv 1609.01596,
    eq. 9: δ_l = (B_l e) ⊙ f'(a_l), with e the error at the last layer with weights, which is exact. B_l e stands for
    the cotangent behind a layer's own activation, the pointwise functions and dropout that follow it, and is pulled
    through these exactly; what comes behind a pool or a flattening, the layer does not see. Layers before the chain
    get B_0 e. The paper leaves the scale of B_l open; see :class:`~gradfree.engines.feedback.FeedbackEngine`.

    Takes outputs (samples, classes); layers inside may have states of any shape.

    Args:
        seed: what the matrices are drawn from.
    """

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
        delta = self.sent(chain, error, end)
        for link in reversed(chain.links[index + 1 : end]):
            delta = chain.pulled(link, delta)
        return delta
