"""Feedback alignment, in any model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from gradfree.chains.memory import Memory
from gradfree.engines.draws import normal
from gradfree.engines.options import check_choice, check_positive
from gradfree.feedback.weight_feedback import WeightFeedbackEngine, learning
from gradfree.layers.roles import weight_of
from gradfree.torchside.optimizer_steps import AfterStep

_FEEDBACK = ("random", "sign", "usf", "brsf", "frsf", "learned", "mirror")
_DECAY = {"learned": 0.001, "mirror": 0.01}
"""The default decays."""
_NOISE = 64
"""Samples of noise in each step of a mirror."""


@dataclass(frozen=True, kw_only=True)
class FA(WeightFeedbackEngine):
    """Feedback alignment: the backward pass uses separate weights B in place of the layers' weights W.

    Works in any model: in the backward pass each ``nn.Linear``, ``nn.Conv1d`` to ``3d`` and ``nn.ConvTranspose1d`` to
    ``3d`` uses B, of the shape of W, for the gradient of its input. Everything else is exact: gradients of weights and
    biases given the error, activations, normalisations, attention, skip connections. Layers with a ``forward`` of a
    subclass or an instance, or whose ``forward`` is not called (inside ``nn.MultiheadAttention``), are exact as well;
    :meth:`validate` lists them.

    Args:
        feedback: the choice of B.

            - "random": drawn once, U(±√(3/fan_in)) (Lillicrap et al. 2016, arXiv 1411.0247; for residual networks
              Moskovitz et al. 2018, arXiv 1812.06488).
            - "sign": the current signs of W times the mean magnitude of W (Liao et al. 2016, arXiv 1510.05067).
            - "usf": the signs of W times He's magnitude √(2/fan_in).
            - "brsf": the signs of W times random magnitudes U(0, √(6/fan_in)), drawn after each optimizer step.
            - "frsf": the same with magnitudes drawn once (the last three: Sanfiz and Akrout 2021, arXiv 2108.13446).
            - "learned": drawn as "random"; after each optimizer step B ← B + ΔW - decay · (B - W), with ΔW the step
              (Kolen and Pollack 1994; Akrout et al. 2019, arXiv 1904.05391).
            - "mirror": drawn as "random"; after each optimizer step B ← (1 - decay) B + decay · y xᵀ, the mean over 64
              samples of noise x ~ N(0, 1) that the layer maps to y = W x. The mean of y xᵀ is W (weight mirrors, Akrout
              et al. 2019, section 3.1).
        decay: of B - W at each step for "learned", 0.001 if left out; of B for "mirror", 0.01.
        seed: of all random numbers. The magnitudes of "brsf" also depend on the type of device.
    """

    feedback: str = "random"
    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "feedback", _FEEDBACK)
        if self.feedback in _DECAY:
            if self.decay is None:
                object.__setattr__(self, "decay", _DECAY[self.feedback])
            check_positive(self, "decay", most=1)
        elif self.decay is not None:
            raise ValueError(f"FA: decay is for feedback='learned' or 'mirror': leave it out for {self.feedback!r}.")

    def feedback_weight(self, memory: Memory, path: str, weight: Tensor, fan_in: float) -> Tensor:
        """Return B of a layer with this weight."""
        drawn = partial(self.matrix, path=path, shape=weight.shape, like=weight, fan_in=fan_in)
        if self.feedback == "random":
            return drawn(memory)
        if self.feedback in _DECAY:
            kept, learned = memory.of(self.feedback), self.feedback == "learned"
            if path not in kept or kept[path].shape != weight.shape:
                # Of "learned" we store B - W: then B follows every change of W, with any optimizer.
                kept[path] = drawn(Memory()) - weight if learned else drawn(Memory())
            kept[path] = kept[path].to(weight.device)
            return weight + kept[path] if learned else kept[path]
        signs = weight.sign()
        if self.feedback == "sign":
            return signs * weight.abs().mean()
        if self.feedback == "usf":
            return signs * sqrt(2.0 / fan_in)
        if self.feedback == "frsf":
            return signs * sqrt(2.0) * drawn(memory).abs()
        generator = self.generator(f"{path}, step {int(memory.of('steps').get('steps', 0))}", weight.device)
        magnitudes = torch.empty_like(weight, dtype=torch.float32)
        return signs * magnitudes.uniform_(0.0, sqrt(6.0 / fan_in), generator=generator)

    def after_step(self, memory: Memory) -> AfterStep | None:
        """Return the function that moves B towards W; for "brsf" it only makes the steps counted."""
        return learning(memory.of(self.feedback), self._moved) if self.feedback in (*_DECAY, "brsf") else None

    def _moved(self, path: str, kept: Tensor, layer: nn.Module, steps: int) -> Tensor:
        """Return the next B - W of "learned", or the next B of "mirror"."""
        decay = self.decay or 0.0
        if self.feedback == "learned":
            return kept * (1.0 - decay)
        weight = weight_of(layer).flatten(1).to(kept)
        generator = self.generator(f"{path}, step {steps}", weight.device)
        x = normal(generator, (weight.shape[1], _NOISE), weight)
        return torch.lerp(kept, (weight @ x @ x.t() / _NOISE).view_as(kept), decay)
