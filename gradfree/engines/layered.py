"""Base class of engines that know what each single layer of a chain does."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.site import Site
from gradfree.engines.engine import Engine
from gradfree.errors import WEIGHT_WITH_STATE
from gradfree.layers.layer_chain import LayerChain
from gradfree.layers.roles import keeps_state


@dataclass(frozen=True, kw_only=True)
class LayerEngine(Engine):
    """An engine for chains of single layers with known roles; subclasses implement :meth:`layer_gradients`."""

    def solves(self, kind: type[Site]) -> bool:
        """Return whether the links of ``kind`` are single layers with known roles."""
        return kind.of_layers

    @property
    def runs_again(self) -> bool:
        """Whether the engine runs layers with weights once more in the backward pass."""
        return self.streams

    def problems_with(self, site: Site) -> Iterator[str]:
        """Yield a problem for each layer with state, if the engine runs layers twice."""
        yield from super().problems_with(site)
        for path, layer in site.blocks.items():
            if self.runs_again and keeps_state(layer):
                yield WEIGHT_WITH_STATE.message(path=path, engine=type(self).__name__)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients for the error at the chain's end; computes without autocast.

        Raises:
            ChainError: the loss uses a state inside the chain.
        """
        assert isinstance(chain, LayerChain)
        with torch.no_grad(), torch.autocast(chain.recording.initial.device.type, enabled=False):
            return self.layer_gradients(chain, chain.error(direct))

    @abstractmethod
    def layer_gradients(self, chain: LayerChain, error: Tensor) -> ChainGradients:
        """Return the gradients, given the cotangent at the output of the chain's last layer with weights."""
