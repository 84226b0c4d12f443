"""Base class of engines that keep weights orthogonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradfree.algebra.cotangents import Cotangent
from gradfree.chains.memory import Memory
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_positive
from gradfree.layers.layer_chain import LayerChain
from gradfree.orthogonal.retraction import Retraction
from gradfree.orthogonal.temperature import LEARNT, Temperature
from gradfree.orthogonal.weights import drift, matrices
from gradfree.torchside.optimizer_steps import AfterStep


@dataclass(frozen=True, kw_only=True)
class OrthogonalEngine(Engine):
    """Keeps the weights of linear layers, and of convolutions with kernel = stride, orthogonal.

    After optimizer steps, a few Newton-Schulz steps retract the weights to orthonormal rows (columns if a layer has
    more outputs than inputs). Weights far from orthogonal at the first retraction are replaced by the nearest
    orthogonal ones. Subclasses compute the gradients, from :meth:`without_temperature`.

    Args:
        orthogonalize_every: optimizer steps from one retraction to the next; ``None`` retracts each weight once its
            drift ‖W Wᵀ - I‖, measured at every step, has passed 0.1.
        orthogonalize_steps: Newton-Schulz steps of one retraction.
        temperature: T, the factor of the chain's output while the engine is attached, in training and evaluation. The
            error is taken without this factor, e = softmax(T y) - t. T makes up for the bounded logits of orthogonal
            layers. "learnt" starts at 1; see :class:`~gradfree.orthogonal.temperature.Temperature`.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range.
    """

    orthogonalize_every: int | None = None
    orthogonalize_steps: int = 1
    temperature: float | Literal["learnt"] = LEARNT

    def __post_init__(self) -> None:
        if self.orthogonalize_every is not None:
            check_count(self, "orthogonalize_every", least=1)
        check_count(self, "orthogonalize_steps", least=1)
        check_positive(self, "temperature", word=LEARNT)

    @property
    def keeps_means(self) -> bool:
        """Whether there are running means to average over ranks: those of a learnt temperature."""
        return self.temperature == LEARNT

    @property
    def evaluates(self) -> bool:
        """Whether there is a temperature, a factor of the chain's outputs in evaluation, too."""
        return self.temperature != 1.0

    def without_temperature(self, chain: LayerChain, direct: Sequence[Cotangent]) -> Sequence[Cotangent]:
        """Return the cotangents of the error without the factor T, and report T and the drift of the weights."""
        if weights := list(matrices({link.path: link.block for link in chain.links}).values()):
            chain.offer("drift", lambda: drift(weights).max())
        factor = Temperature(chain.memory, self.temperature).factor(chain.recording.initial)
        if self.temperature == LEARNT:
            chain.offer("temperature", lambda: torch.as_tensor(factor))
        if isinstance(factor, Tensor) or factor != 1.0:
            direct = [None if e is None else (e / factor).to(e.dtype) for e in direct]
        return direct

    def after_step(self, memory: Memory) -> AfterStep:
        """Return a function that retracts the weights, and updates a learnt temperature."""
        retraction = Retraction(memory.of("retraction"), self.orthogonalize_every, self.orthogonalize_steps)
        temperature = Temperature(memory, self.temperature)

        def retract(blocks: Mapping[str, nn.Module], steps: int) -> None:
            retraction.after_step(blocks, steps)
            temperature.after_step()

        return retract

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is a kind of chains of known layers."""
        return kind.of_layers

    def install(self, site: Site, attachment: Attachment) -> Sequence[Removable]:
        """Put the engine on one chain, and the temperature after its last layer."""
        parts = super().install(site, attachment)
        if self.temperature == 1.0:
            return parts
        *_, last = site.blocks.values()
        return [*parts, last.register_forward_hook(Temperature(attachment.memory, self.temperature))]
