"""Base class of engines that keep weights orthogonal, with the gradients of any other engine."""

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
    """Keeps the weights of linear layers, and of convolutions with kernel = stride, orthogonal.

    The gradients are those of another engine, :attr:`rule`. After optimizer steps, a few Newton-Schulz steps retract
    the weights to orthonormal rows (columns if a layer has more outputs than inputs). Weights far from orthogonal at
    the first retraction are replaced by the nearest orthogonal ones.

    Args:
        orthogonalize_every: optimizer steps from one retraction to the next; ``None`` retracts each weight once its
            drift ‖W Wᵀ - I‖, measured at every step, has passed 0.1.
        orthogonalize_steps: Newton-Schulz steps of one retraction.
        temperature: T, the factor of the chain's output while the engine is attached, in training and evaluation. The
            error is taken without this factor, e = softmax(T y) - t. T makes up for the bounded logits of orthogonal
            layers. "learnt" starts at 1; see :class:`~gradfree.orthogonal.temperature.Temperature`.

    Raises:
        TypeError: an option of another type, or a rule that does not take layers or puts other parts on a model.
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
                f"{name}: {rule!r} overrides Engine.install, whose hooks would be lost here. An engine that keeps "
                "weights orthogonal by itself needs no wrapper; others can override Engine.after_step."
            )

    @property
    @abstractmethod
    def rule(self) -> Engine:
        """The engine that computes the gradients."""

    @property
    def needs_residual(self) -> bool:
        """As in :attr:`rule`."""
        return self.rule.needs_residual

    @property
    def keeps_means(self) -> bool:
        """Whether there are running means to average over ranks: the temperature, or those of :attr:`rule`."""
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
        """Return ``report`` with the notes and problems of :attr:`rule`."""
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
        """Return a function that retracts the weights, and then calls that of :attr:`rule`."""
        retraction = Retraction(memory.of("retraction"), self.orthogonalize_every, self.orthogonalize_steps)
        after_rule = self.rule.after_step(memory)

        def retract(blocks: Mapping[str, nn.Module], steps: int) -> None:
            retraction.after_step(blocks, steps)
            *_, last = blocks.values()
            for hook in last._forward_hooks.values():
                if isinstance(hook, Temperature):
                    hook.after_step()
            if after_rule is not None:
                after_rule(blocks, steps)

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
