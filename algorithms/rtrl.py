"""Real-time recurrent learning."""

from __future__ import annotations

from dataclasses import dataclass

from gradfree.engines.online import DenseInfluences, InfluenceEngine
from gradfree.time.closed_forms import Links
from gradfree.time.time_chain import TimeChain


@dataclass(frozen=True, kw_only=True)
class RTRL(InfluenceEngine):
    """Real-time recurrent learning: the whole influence P_t = F_t P_{t-1} + ∂f_t/∂θ goes along with the state; K = F.

    Williams and Zipser, "A learning algorithm for continually running fully recurrent neural networks", 1989. Exact:
    over a stream whose parameters do not change, the gradients of all chunks add up to those of backpropagation through
    the whole sequence, with memory that does not depend on its length. Inside a chunk the errors go backwards, and P
    crosses the borders (Schmidhuber 1992, "A fixed size storage O(n³) time complexity learning algorithm for fully
    recurrent continually running networks"): the same numbers at a cost of H in place of H² for each weight and step.
    Modules before the layer get the gradients of the present chunk. In a stack of layers each has a P of its own: what
    a layer did to the states of later layers in earlier chunks is left out.

    Needs nothing but a recurrent layer, of any cell. Without ``stream`` it is ``backprop``. In a stream, P takes H
    times the memory of the weights for each sequence, and a chunk takes H more backward passes, in one batch.

    Args:
        stream: see :class:`~gradfree.engines.online.StreamEngine`.
    """

    def links(self, chain: TimeChain) -> Links:
        """Return the links themselves."""
        return chain.repeated_links(1)

    def influences(self, chain: TimeChain) -> DenseInfluences:
        """Return P for each component of a state."""
        return DenseInfluences(chain)
