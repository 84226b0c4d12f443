"""Feedback alignment, in any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.chain import Chain, ChainGradients
from gradfree.chains.memory import Memory
from gradfree.chains.site import Site
from gradfree.engines.options import check_positive
from gradfree.feedback.feedback_layers import FeedbackLayers
from gradfree.feedback.random_feedback import RandomEngine
from gradfree.layers.roles import weight_of
from gradfree.torchside.optimizer_steps import AfterStep
from gradfree.wording import no_such

_FEEDBACK = ("random", "sign", "usf", "brsf", "frsf", "learned", "mirror")
_DECAY = {"learned": 0.001, "mirror": 0.01}
"""The default decays."""
_NOISE = 64
"""Samples of noise in each step of a mirror."""


@dataclass(frozen=True, kw_only=True)
class FA(RandomEngine):
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
        if self.feedback not in _FEEDBACK:
            raise ValueError(f"FA: {no_such('feedback', str(self.feedback), _FEEDBACK)}")
        if self.feedback not in _DECAY and self.decay is not None:
            raise ValueError(
                f"FA: decay is for feedback='learned' or 'mirror', not for {self.feedback!r}. Leave it out."
            )
        if self.feedback in _DECAY:
            if self.decay is None:
                object.__setattr__(self, "decay", _DECAY[self.feedback])
            check_positive(self, "decay")
            if self.decay > 1.0:  # type: ignore[operator]
                raise ValueError(f"FA: decay must be at most 1, not {self.decay}.")

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

    def feedback_weight(self, memory: Memory, path: str, weight: Tensor, fan_in: float) -> Tensor:
        """Return B of a layer with this weight; see :class:`~gradfree.feedback.feedback_layers.FeedbackSource`."""
        if self.feedback == "random":
            return self.matrix(memory, path, weight.shape, weight, fan_in)
        if self.feedback == "learned":
            # We store B - W: then B follows every change of W, with any optimizer.
            kept = memory.of("learned")
            if path not in kept:
                kept[path] = self.matrix(Memory(), path, weight.shape, weight, fan_in) - weight
            kept[path] = kept[path].to(weight.device)
            return weight + kept[path]
        if self.feedback == "mirror":
            kept = memory.of("mirror")
            if path not in kept:
                kept[path] = self.matrix(Memory(), path, weight.shape, weight, fan_in)
            kept[path] = kept[path].to(weight.device)
            return kept[path]
        signs = weight.sign()
        if self.feedback == "sign":
            return signs * weight.abs().mean()
        if self.feedback == "usf":
            return signs * sqrt(2.0 / fan_in)
        if self.feedback == "frsf":
            return signs * sqrt(2.0) * self.matrix(memory, path, weight.shape, weight, fan_in).abs()
        steps = int(memory.of("steps").get("steps", 0))
        magnitudes = torch.empty_like(weight, dtype=torch.float32).uniform_(
            0.0, sqrt(6.0 / fan_in), generator=self.generator(f"{path}, step {steps}", weight.device)
        )
        return signs * magnitudes

    def after_step(self, memory: Memory) -> AfterStep | None:
        """Return the function that moves B towards W; for "brsf" it only makes the steps counted."""
        if self.feedback not in ("learned", "brsf", "mirror"):
            return None
        decay = self.decay

        def mirror(blocks: Mapping[str, nn.Module], steps: int) -> None:
            kept = memory.of("mirror")
            for path in kept.keys() & blocks.keys():
                weight = weight_of(blocks[path]).flatten(1).to(kept[path])
                generator = self.generator(f"{path}, step {steps}", weight.device)
                x = torch.randn(weight.shape[1], _NOISE, generator=generator, device=weight.device).to(weight)
                kept[path] = torch.lerp(kept[path], (weight @ x @ x.t() / _NOISE).view_as(kept[path]), decay or 0.0)

        if self.feedback == "mirror":
            return mirror

        def decay_differences(blocks: Mapping[str, nn.Module], steps: int) -> None:
            if self.decay is not None:
                kept = memory.of("learned")
                # Not in place: a state_dict may share the tensors.
                kept.update({path: difference * (1.0 - self.decay) for path, difference in kept.items()})

        return decay_differences
