"""An engine on one rank's run of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.report import Report
from gradfree.chains.site import Site
from gradfree.depth.depth_chain import DepthChain
from gradfree.engines.engine import Engine
from gradfree.ranks.messages import Messages
from gradfree.ranks.rank_pass import RankPass
from gradfree.torchside.private import after_backward


@dataclass(frozen=True, kw_only=True)
class OnRank(Engine):
    """What is attached to a rank's blocks: gives their chain to the engine, with the line to its neighbours.

    Args:
        engine: the engine.
        name: what the rank's chain is called.
        messages: the ranks.
        passes: those that may have a backward pass, by what their first block has returned.
    """

    engine: Engine
    name: str
    messages: Messages = field(repr=False)
    passes: Mapping[Tensor, RankPass] = field(repr=False)

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is one of whole blocks in depth."""
        return kind.dimension == "depth" and not kind.of_layers

    @property
    def needs_residual(self) -> bool:
        """Whether the engine asks for a chain's residual path."""
        return self.engine.needs_residual

    def judge(self, model: nn.Module, report: Report) -> Report:
        """Return the engine's report on the rank's chain, which is named after the rank."""
        report = self.engine.judge(model, report)
        (site,) = report.chains.values()
        site.path = self.name
        return replace(report, chains={self.name: site})

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of this rank's links."""
        assert isinstance(chain, DepthChain)
        try:
            its = self.passes[chain.links[0].out]
            chain.before = its.before
            found = self.engine.gradients_on_ranks(chain, direct, its)
        except Exception as error:
            self.messages.report(error)
            raise
        # Not now: a rank may have to get something else from this one first.
        after_backward(self.messages.settle)
        return found
