"""The engine that is attached to one rank's run of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.report import Report
from gradfree.chains.site import Site
from gradfree.depth.depth_chain import DepthChain
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import EXACT_ON_RANKS
from gradfree.ranks.messages import Messages
from gradfree.ranks.rank_pass import RankPass
from gradfree.torchside.private import after_backward


@dataclass(frozen=True, kw_only=True)
class OnRank(Engine):
    """Lets an engine solve a rank's chain together with the neighbouring ranks.

    Args:
        engine: the user's engine.
        name: the name of the rank's chain.
        messages: connects the ranks.
        passes: the passes that may have a backward pass, by the output of their first block.
    """

    engine: Engine
    name: str
    messages: Messages = field(repr=False)
    passes: Mapping[Tensor, RankPass] = field(repr=False)

    @property
    def needs_residual(self) -> bool:
        """Whether the engine asks for a chain's residual path."""
        return self.engine.needs_residual

    def find(self, model: nn.Module, chains: Chains | None) -> Report:
        """Return the rank's chain, under its name."""
        report = super().find(model, chains)
        (site,) = report.chains.values()
        site.path = self.name
        return replace(report, chains={self.name: site})

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield the engine's problems with the chain."""
        return self.engine.problems_with(site)

    def exact_gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Raise: a rank would lack the cotangents of the others."""
        raise EXACT_ON_RANKS.error(path=self.name)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of this rank's links."""
        assert isinstance(chain, DepthChain)
        rank_pass = self.passes[chain.links[0].out]
        chain.before = rank_pass.before
        gradients = self.engine.gradients_on_ranks(chain, direct, rank_pass)
        # Wait only after the backward pass: the other rank may first need another message from this one.
        after_backward(self.messages.settle)
        return gradients
