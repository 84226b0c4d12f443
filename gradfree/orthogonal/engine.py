"""Engines that keep weights orthogonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from gradfree.chains.chain import Chain
from gradfree.chains.memory import Memory
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count
from gradfree.layers.chain import LayerChain
from gradfree.orthogonal.retraction import Retraction
from gradfree.orthogonal.weights import drift, matrices
from gradfree.torchside.optimizer_steps import OptimizerSteps


@dataclass(frozen=True, kw_only=True)
class OrthogonalEngine(Engine):
    """An engine that keeps the weights of linear layers, and of convolutions with kernel = stride, orthogonal.

    After steps of any optimizer that holds weights of the chain, a few Newton-Schulz steps lead them back to
    orthonormal rows (or columns, where a layer has more outputs than inputs). Weights that are far off the
    first time are replaced by the nearest orthogonal ones.

    Args:
        orthogonalize_every: optimizer steps from one retraction to the next; ``None`` leads each weight back once its
            drift ‖W Wᵀ - I‖, measured at every step, has passed 0.1.
        orthogonalize_steps: Newton-Schulz steps of one retraction.
        temperature: what the chain's output is multiplied by while the engine is attached, in training and
            evaluation; the error is taken without this factor, e = softmax(T y) - t. Orthogonal layers bound
            the logits, which this makes up for.
    """

    orthogonalize_every: int | None = None
    orthogonalize_steps: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.orthogonalize_every is not None:
            check_count(self, "orthogonalize_every", least=1)
        check_count(self, "orthogonalize_steps", least=1)
        name = type(self).__name__
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, float | int):
            raise TypeError(f"{name}: temperature must be a number, not {self.temperature!r}.")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"{name}: temperature must be positive and finite, not {self.temperature}.")

    def solves(self, kind: type[Site]) -> bool:
        """Tell whether ``kind`` is of layers that can be taken apart."""
        return kind.of_layers

    def parts(self, site: Site, attachment: Attachment) -> Sequence[Removable]:
        """Put the engine on one chain, begin to watch its optimizer, and put the temperature behind its last layer."""
        memory = attachment.memory
        retraction = Retraction(memory.of("retraction"), self.orthogonalize_every, self.orthogonalize_steps)

        def after_step(blocks: Mapping[str, nn.Module], steps: int) -> None:
            retraction.after_step(blocks, steps)
            self.after_step(memory, steps)

        parts = [*super().parts(site, attachment), OptimizerSteps(site.blocks, memory.of("steps"), after_step)]
        if self.temperature == 1.0:
            return parts
        *_, last = site.blocks.values()
        return [*parts, last.register_forward_hook(_Temperature(self.temperature))]

    def offer_drift(self, chain: Chain) -> None:
        """Let those who ask know how far the weights are from orthogonal."""
        assert isinstance(chain, LayerChain)
        weights = list(matrices({link.path: link.block for link in chain.links}).values())
        if weights:
            chain.offer("drift", lambda: drift(weights).max())

    def after_step(self, memory: Memory, steps: int) -> None:
        """Do what else is due after the optimizer's ``steps``-th step."""


class _Temperature:
    """A forward hook: multiplies the output."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(self, module: nn.Module, args: tuple[object, ...], out: Tensor) -> Tensor:
        return self.factor * out
