"""Engines that use feedback weights B in place of layers' weights W, in the backward pass of any model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import Memory
from gradfree.chains.site import Site
from gradfree.feedback.feedback_layers import FeedbackLayers
from gradfree.feedback.random_feedback import RandomEngine
from gradfree.torchside.optimizer_steps import AfterStep


@dataclass(frozen=True, kw_only=True)
class WeightFeedbackEngine(RandomEngine):
    """An engine that gives each linear layer and convolution a B in place of W, for the gradient of its input."""

    @property
    def kinds(self) -> list[type[Site]]:
        """Modules that contain linear layers or convolutions."""
        return [FeedbackLayers]

    def notes_about(self, site: Site) -> Iterator[str]:
        """Yield a note about the layers that stay exact."""
        assert isinstance(site, FeedbackLayers)
        if site.exact:
            which = ", ".join(f"{where or 'the model'} ({kind})" for where, kind in site.exact.items())
            yield f"the error goes exactly through the weights of {which}."

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the exact gradients of a chain that was recorded for another engine."""
        return chain.backpropagate(direct)

    @abstractmethod
    def feedback_weight(self, memory: Memory, path: str, weight: Tensor, fan_in: float) -> Tensor:
        """Return B of a layer, shaped like its weight.

        Args:
            memory: of the engine on the layer.
            path: of the layer.
            weight: the layer's current weight.
            fan_in: the number of inputs that each output sums, on average.
        """


def learning(kept: dict[str, Tensor], rule: Callable[[str, Tensor, nn.Module, int], Tensor]) -> AfterStep:
    """Return a function that replaces the tensors of layers by what ``rule`` returns, after each optimizer step.

    Args:
        kept: the tensors, by the layers' paths.
        rule: (path, tensor, layer, number of steps so far) -> new tensor; not in place, as a state_dict may share it.
    """

    def after(blocks: Mapping[str, nn.Module], steps: int) -> None:
        for path in kept.keys() & blocks.keys():
            kept[path] = rule(path, kept[path], blocks[path], steps)

    return after
