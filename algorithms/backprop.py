"""Exact backpropagation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.report import Report, path_name
from gradfree.engines.discovery import Chains, validate
from gradfree.engines.engine import NOTHING_ATTACHED, Engine
from gradfree.engines.rank_segment import Neighbors, rank_gradients
from gradfree.loops.compiled import run_plain_loop
from gradfree.loops.recurrence import Loop, LoopMemory, Runner
from gradfree.time.forward import LayerCall


@dataclass(frozen=True, kw_only=True)
class Backprop(Engine):
    """Exact backpropagation: batched over time for recurrent layers, by autograd for everything else.

    Args:
        plain: which chains are left to autograd. ``None``: chains in depth, since autograd is fastest there; the engine
            is attached to recurrent layers only, and a note says so if there are none. ``True``: all chains; the model
            trains as without gradfree. ``False``: none; chains in depth are solved link by link.
    """

    plain: bool | None = None

    def __post_init__(self) -> None:
        if self.plain is not None and not isinstance(self.plain, bool):
            raise TypeError(f"Backprop: plain must be None, True or False, not {self.plain!r}.")

    @classmethod
    def exact_ones(cls) -> Sequence[Engine]:
        """Return the engine that batches recurrent layers over time, and the one that leaves everything to autograd."""
        return (cls(), cls(plain=True))

    @property
    def solves_pieces(self) -> bool:
        """Return True: gradients are exact."""
        return True

    @property
    def evaluates(self) -> bool:
        """Return True: packed sequences run in runs in evaluation, too."""
        return True

    @property
    def loops(self) -> Runner:
        """The plain loop."""
        return run_plain

    def leave_to_torch(self, call: LayerCall) -> Sequence[Callable[[], None]] | None:
        """Leave packed sequences and evaluation to torch where it is faster; for other calls only warn."""
        if not call.trains or (call.layout != "batch" and call.torch_is_faster):
            return ()
        if call.length > 1 and call.torch_is_faster:
            call.warn(
                f"backprop is slower than torch's own kernel for this {call.mode}: {call.length} steps of "
                f"{tuple(call.like.shape)} in {call.like.dtype}. The engine 'shooting' leaves such layers to torch; "
                "backprop(plain=True) leaves all layers to torch."
            )
        return None

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients."""
        return chain.backpropagate(direct)

    def problems_on_ranks(self, count: int) -> Iterator[str]:
        """Yield nothing: across ranks, chains are solved link by link for any ``plain``."""
        return iter(())

    def gradients_on_ranks(self, chain: Chain, direct: Any, neighbors: Neighbors) -> ChainGradients:
        """Return the exact gradients, rank after rank; a rank sends its cotangent before it computes its gradients."""
        return rank_gradients(chain, direct, neighbors)

    def find(self, model: nn.Module, chains: Chains | None) -> Report:
        """Return the chains that the engine attaches to; those left to autograd are no problem, but not among them."""
        if self.plain is False:
            return super().find(model, chains)
        left = [kind for kind in self.kinds if self.plain or kind.dimension == "depth"]
        report = validate(model, chains, [kind for kind in self.kinds if kind not in left], left)
        if report.chains or report.problems or self.plain:
            return report
        depth = ", ".join(map(path_name, validate(model, chains, left).chains))
        left_to_it = f"chains in depth are left to it, here {depth}; backprop(plain=False) takes them"
        why = left_to_it if depth else "the model has no recurrent layer"
        return replace(report, notes=[f"{NOTHING_ATTACHED}{why}."])


def run_plain(loop: Loop, memory: LoopMemory, scratch: nn.Module | None) -> tuple[Any, Any]:
    """Run a loop as it is, or in compiled chunks."""
    return run_plain_loop(loop, memory.compiler)
