"""Keeping weights orthogonal, whichever engine gives the gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import Memory
from gradfree.chains.report import Report
from gradfree.chains.site import Removable, Site
from gradfree.chains.solving import Attachment
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_positive
from gradfree.layers.layer_chain import LayerChain
from gradfree.layers.layer_site import Layered
from gradfree.orthogonal.retraction import Retraction
from gradfree.orthogonal.temperature import LEARNT, Temperature
from gradfree.orthogonal.weights import drift, matrices
from gradfree.torchside.optimizer_steps import AfterStep


@dataclass(frozen=True, kw_only=True)
class OrthogonalEngine(Engine):
    """Keeps the weights of linear layers, and of convolutions with kernel = stride, orthogonal under another engine.

    The gradients are those of :attr:`rule`. After steps of any optimizer that holds weights of the chain, a few
    Newton-Schulz steps lead them back to orthonormal rows (or columns, where a layer has more outputs than inputs).
    Weights that are far off the first time are replaced by the nearest orthogonal ones.

    Args:
        orthogonalize_every: optimizer steps from one retraction to the next; ``None`` leads each weight back once its
            drift ‖W Wᵀ - I‖, measured at every step, has passed 0.1.
        orthogonalize_steps: Newton-Schulz steps of one retraction.
        temperature: what the chain's output is multiplied by while the engine is attached, in training and
            evaluation; the error is taken without this factor, e = softmax(T y) - t. Orthogonal layers bound
            the logits, which this makes up for. "learnt" with the weights, from 1 on; see
            :class:`~gradfree.orthogonal.temperature.Temperature`.

    Raises:
        TypeError: an option of another type, or a rule that does not take layers or has parts of its own.
        ValueError: an option out of range.
    """

    orthogonalize_every: int | None = None
    orthogonalize_steps: int = 1
    temperature: float | Literal["learnt"] = LEARNT

    def __post_init__(self) -> None:
        if self.orthogonalize_every is not None:
            check_count(self, "orthogonalize_every", least=1)
        check_count(self, "orthogonalize_steps", least=1)
        name = type(self).__name__
        if self.temperature != LEARNT:
            check_positive(self, "temperature")
        rule = self.rule
        if not isinstance(rule, Engine) or not any(issubclass(Layered, kind) for kind in rule.kinds):
            raise TypeError(f"{name} keeps weights orthogonal under an engine for layers, not under {rule!r}.")
        if type(rule).install is not Engine.install:
            raise TypeError(
                f"{name}: {rule!r} puts its own parts on a model, which would be left off. One that keeps weights "
                "orthogonal already needs no other round it; of others, see Engine.after_step."
            )

    @property
    @abstractmethod
    def rule(self) -> Engine:
        """The engine that gives the gradients."""

    @property
    def needs_residual(self) -> bool:
        """As in :attr:`rule`."""
        return self.rule.needs_residual

    @property
    def keeps_means(self) -> bool:
        """Whether ranks have something to average: the temperature, or what :attr:`rule` keeps."""
        return self.temperature == LEARNT or self.rule.keeps_means

    @property
    def reads_states(self) -> bool:
        """As in :attr:`rule`."""
        return self.rule.reads_states

    @property
    def streams(self) -> bool:
        """As in :attr:`rule`."""
        return self.rule.streams

    def judge(self, model: nn.Module, report: Report) -> Report:
        """Return ``report`` with what :attr:`rule` has to say."""
        return self.rule.judge(model, report)

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of :attr:`rule`, for the error without the temperature."""
        assert isinstance(chain, LayerChain)
        if weights := list(matrices({link.path: link.block for link in chain.links}).values()):
            chain.offer("drift", lambda: drift(weights).max())
        factor = Temperature(chain.memory, self.temperature).factor(chain.recording.initial)
        if self.temperature == LEARNT:
            chain.offer("temperature", lambda: torch.as_tensor(factor))
        if isinstance(factor, Tensor) or factor != 1.0:
            direct = [None if e is None else (e / factor).to(e.dtype) for e in direct]
        return self.rule.gradients(chain, direct)

    def after_step(self, memory: Memory) -> AfterStep:
        """Return what leads the weights back, and then does what is due for :attr:`rule`."""
        retraction = Retraction(memory.of("retraction"), self.orthogonalize_every, self.orthogonalize_steps)
        then = self.rule.after_step(memory)

        def retract(blocks: Mapping[str, nn.Module], steps: int) -> None:
            retraction.after_step(blocks, steps)
            *_, last = blocks.values()
            for hook in last._forward_hooks.values():
                if isinstance(hook, Temperature):
                    hook.after_step()
            if then is not None:
                then(blocks, steps)

        return retract

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is of layers that can be taken apart."""
        return kind.of_layers

    def install(self, site: Site, attachment: Attachment) -> Sequence[Removable]:
        """Put the engine on one chain, and the temperature behind its last layer."""
        parts = super().install(site, attachment)
        if self.temperature == 1.0:
            return parts
        *_, last = site.blocks.values()
        return [*parts, last.register_forward_hook(Temperature(attachment.memory, self.temperature))]
