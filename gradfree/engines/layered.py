"""Base class of engines that know what each single layer of a chain does."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.report import Report
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
    def reads_states(self) -> bool:
        """False: the tensors that autograd saves are enough."""
        return False

    @property
    def runs_again(self) -> bool:
        """Whether the engine runs layers with weights once more in the backward pass."""
        return self.streams

    def judge(self, model: nn.Module, report: Report) -> Report:
        """Return ``report`` with a problem for each layer with state, if the engine runs layers twice."""
        report = super().judge(model, report)
        if not self.runs_again:
            return report
        problems = [
            WEIGHT_WITH_STATE.message(path=path, engine=type(self).__name__)
            for site in report.chains.values()
            for path, layer in site.blocks.items()
            if keeps_state(layer)
        ]
        return replace(report, problems=[*report.problems, *problems])

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
