"""Standard backpropagation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.neighbors import Neighbors
from gradfree.chains.report import Report, path_name
from gradfree.devices.costs import own_kernel_is_faster
from gradfree.engines.discovery import Chains, validate
from gradfree.engines.engine import Engine
from gradfree.engines.rank_segment import RankSegment
from gradfree.time.forward import LayerCall


@dataclass(frozen=True, kw_only=True)
class Backprop(Engine):
    """Exact backpropagation: of recurrent layers batched over time, of all else autograd's own.

    Args:
        plain: what is left to autograd. ``None``: chains in depth, where its own way to the same gradients is the
            quickest; only recurrent layers are attached to, with a warning if there are none. ``True``: everything, the
            model trains as it would without gradfree. ``False``: nothing, chains in depth are solved link by link, too.
    """

    plain: bool | None = None

    def __post_init__(self) -> None:
        if self.plain is not None and not isinstance(self.plain, bool):
            raise TypeError(f"Backprop: plain must be None, True or False, not {self.plain!r}.")

    @classmethod
    def exact_ones(cls) -> Sequence[Engine]:
        """Return that which batches recurrent layers over time, and plain backpropagation."""
        return (cls(), cls(plain=True))

    @property
    def reads_states(self) -> bool:
        """Whether it asks for the values of states: never."""
        return False

    def leave_to_torch(self, call: LayerCall) -> Callable[[], None] | None:
        """Leave nothing, but say where torch's own kernel is faster."""
        if call.length > 1 and own_kernel_is_faster(call.mode, call.length, call.like, call.packed):
            call.warn(
                f"backprop is slower here than torch's own kernel, {call.mode} over {call.length} steps of "
                f"{tuple(call.like.shape)} in {call.like.dtype}. The engine 'shooting' leaves such layers to torch, "
                "backprop(plain=True) all of them."
            )
        return None

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients."""
        return chain.backpropagate(direct)

    def problems_on_ranks(self, count: int) -> Iterator[str]:
        """Yield nothing: what lies on ranks is solved link by link, whatever ``plain`` says."""
        return iter(())

    def gradients_on_ranks(self, chain: Chain, direct: Any, neighbors: Neighbors) -> ChainGradients:
        """Return the exact gradients, rank after rank; each sends cotangents on before it makes its own gradients."""
        return RankSegment(chain, direct, neighbors).exact_gradients()

    def find(self, model: nn.Module, chains: Chains | None) -> Report:
        """Return what the engine attaches to; what it leaves to autograd is one only with another engine."""
        if self.plain is False:
            return super().find(model, chains)
        left = [kind for kind in self.kinds if self.plain or kind.dimension == "depth"]
        report = validate(model, chains, [kind for kind in self.kinds if kind not in left], left)
        if report.chains or report.problems or self.plain:
            return report
        depth = ", ".join(map(path_name, validate(model, chains, left).chains))
        why = f"plain=False takes {depth}, too" if depth else "the model has no recurrent layer"
        return replace(report, notes=[f"nothing is attached, autograd computes all gradients: {why}."])
